"""`ttlcache front`: options, and the server that runs the proxy."""

from __future__ import annotations

from dataclasses import dataclass

import typer
from rich.console import Console

from ttlcache.cli.command import REQUIRED, option
from ttlcache.cli.common import fail
from ttlcache.errors import ConfigError


@dataclass(frozen=True, slots=True)
class FrontOptions:
    """Where it listens, and for whom."""

    upstream: str = option(
        REQUIRED, "The router (or one vLLM), e.g. http://router:30000."
    )
    host: str = option("127.0.0.1", "Address to listen on.")
    port: int = option(8080, "Port to listen on.", min=0, max=65535)
    ranks: int = option(
        0,
        "Data-parallel ranks of the one vLLM behind: each program keeps to one, by "
        "X-data-parallel-rank. 0 where a router chooses them.",
        min=0,
    )
    keep_alive_s: int = option(
        5,
        "Seconds that an idle connection of a client stays open: more than a load "
        "balancer before the front keeps it.",
        min=1,
    )


def front(options: FrontOptions, _: Console) -> None:
    """Give programs without a session id a stable one, before a router."""
    try:
        import uvicorn

        from ttlcache_connector.front.app import Front
    except ImportError as error:
        fail(f"{error}; pip install 'ttlcache[fleet]'")
    try:
        app = Front(options.upstream, options.ranks)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from None
    address = f"http://{options.host}:{options.port}"
    typer.echo(f"ttlcache front: {address} before {options.upstream}", err=True)
    # Nothing ends a stream but its upstream and its client; log lines a request
    # would be most of the proxy's work. `date` and `server` are the upstream's.
    uvicorn.run(
        app,
        host=options.host,
        port=options.port,
        timeout_keep_alive=options.keep_alive_s,
        access_log=False,
        log_level="warning",
        date_header=False,
        server_header=False,
    )
