"""Light upstreams, a real vllm-router and a real `ttlcache front`, as processes."""

from __future__ import annotations

import sys
from pathlib import Path

import httpx
import pytest

from bench.compare.fleet.front import Front
from bench.compare.fleet.router import Router
from bench.serve.ports import free_ports
from bench.serve.process import ServerProcess
from ttlcache_connector.front import app
from ttlcache_connector.front.upload import Room

#: Anything longer is a hang, on the slowest of machines.
HANG_S = 120.0
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="session")
def anyio_backend():
    """Of the tests that are coroutines."""
    return "asyncio"


def front_before(
    transport: httpx.AsyncBaseTransport | None = None,
    url: str = "http://up",
    **room: float,
) -> app.Front:
    """The application in this process."""
    client = httpx.AsyncClient(transport=transport)
    return app.Front(url, client=client, room=Room(**room))


class Upstream(ServerProcess):
    """`tests/front/upstream.py` on a free port."""

    def __init__(self, name: str, folder: Path) -> None:
        (port,) = free_ports(1)
        self.base_url = f"http://127.0.0.1:{port}"
        command = [sys.executable, str(Path(__file__).with_name("upstream.py"))]
        super().__init__(
            [*command, name, str(port)],
            f"{self.base_url}/health",
            folder / f"{name}.log",
        )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("front")


@pytest.fixture(scope="module")
def upstreams(folder):
    with Upstream("left", folder) as left, Upstream("right", folder) as right:
        yield {"left": left, "right": right}


@pytest.fixture(scope="module")
def policy():
    """The router's; what docs/fleet.md sets up."""
    return "sticky_least_loaded"


@pytest.fixture(scope="module")
def router(upstreams, folder, policy):
    urls = [upstream.base_url for upstream in upstreams.values()]
    with Router(urls, policy, folder / "router.log") as router:
        yield router


@pytest.fixture(scope="module")
def front(router, folder):
    """Before the router."""
    with Front(router.base_url, folder / "front.log") as front:
        yield front
