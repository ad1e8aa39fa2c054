"""`ttlcache front`: options, and the server that runs the proxy."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from ttlcache_connector.front.replicas import PressureBound

_BOUND = PressureBound()


def front(
    upstream: Annotated[
        str, typer.Option(help="The router (or one vLLM), e.g. http://router:30000.")
    ],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8080,
    replica: Annotated[
        list[str] | None,
        typer.Option(
            help="A vLLM behind the router; may be repeated. With them, sub-agents "
            "of a program whose replica is over the bound go by their own id."
        ),
    ] = None,
    pressure_metric: Annotated[
        str, typer.Option(help="The replicas' gauge that the bound is on.")
    ] = _BOUND.metric,
    pressure_bound: Annotated[
        float, typer.Option(help="A replica is over it while the gauge is greater.")
    ] = _BOUND.bound,
    ranks: Annotated[
        int,
        typer.Option(
            help="Data-parallel ranks of the one vLLM behind: each program keeps to "
            "one, by X-data-parallel-rank. 0 where a router chooses them.",
            min=0,
        ),
    ] = 0,
    every_path: Annotated[
        bool,
        typer.Option(
            "--every-path", help="Also the administration of what is behind the front."
        ),
    ] = False,
) -> None:
    """Give programs without a session id a stable one, before a router.

    VLLM_API_KEY, where it is set, is the replicas' key.
    """
    import uvicorn

    from ttlcache_connector.front.app import Front
    from ttlcache_connector.front.replicas import Replicas

    bound = PressureBound(pressure_metric, pressure_bound)
    replicas = Replicas(replica or (), bound, os.environ.get("VLLM_API_KEY"))
    app = Front(upstream, replicas, ranks, every_path=every_path)
    # Nothing ends a stream but its upstream and its client; log lines a request
    # would be most of the proxy's work.
    uvicorn.run(app, host=host, port=port, access_log=False, log_level="warning")
