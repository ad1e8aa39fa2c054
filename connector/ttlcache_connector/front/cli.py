"""`ttlcache front`: options, and the server that runs the proxy."""

from __future__ import annotations

from typing import Annotated

import typer

from ttlcache.cli.common import fail
from ttlcache.errors import ConfigError


def front(
    upstream: Annotated[
        str, typer.Option(help="The router (or one vLLM), e.g. http://router:30000.")
    ],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="Port to listen on.", min=0, max=65535)
    ] = 8080,
    ranks: Annotated[
        int,
        typer.Option(
            help="Data-parallel ranks of the one vLLM behind: each program keeps to "
            "one, by X-data-parallel-rank. 0 where a router chooses them.",
            min=0,
        ),
    ] = 0,
    keep_alive_s: Annotated[
        int,
        typer.Option(
            help="Seconds that an idle connection of a client stays open: more than a "
            "load balancer before the front keeps it.",
            min=1,
        ),
    ] = 5,
) -> None:
    """Give programs without a session id a stable one, before a router."""
    try:
        import uvicorn

        from ttlcache_connector.front.app import Front
    except ImportError as error:
        fail(f"{error}; pip install 'ttlcache[fleet]'")
    try:
        app = Front(upstream, ranks)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from None
    typer.echo(f"ttlcache front: http://{host}:{port} before {upstream}", err=True)
    # Nothing ends a stream but its upstream and its client; log lines a request
    # would be most of the proxy's work. `date` and `server` are the upstream's.
    uvicorn.run(
        app,
        host=host,
        port=port,
        timeout_keep_alive=keep_alive_s,
        access_log=False,
        log_level="warning",
        date_header=False,
        server_header=False,
    )
