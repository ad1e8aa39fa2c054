"""Light upstreams, a real vllm-router and a real `ttlcache front`, as processes."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import anyio
import pytest

from bench.compare.fleet.front import Front
from bench.compare.fleet.router import Router
from bench.serve.ports import free_ports
from bench.serve.process import ServerProcess

#: Anything longer is a hang, on the slowest of machines.
HANG_S = 120.0


def run(story: Callable[[], Awaitable[None]]) -> None:
    async def within() -> None:
        with anyio.fail_after(HANG_S):
            await story()

    asyncio.run(within())


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
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("front")


@pytest.fixture(scope="module")
def upstreams(folder: Path) -> Iterator[dict[str, Upstream]]:
    with Upstream("left", folder) as left, Upstream("right", folder) as right:
        yield {"left": left, "right": right}


@pytest.fixture(scope="module")
def policy() -> str:
    """The router's; what docs/fleet.md sets up."""
    return "sticky_least_loaded"


@pytest.fixture(scope="module")
def router(
    upstreams: dict[str, Upstream], folder: Path, policy: str
) -> Iterator[Router]:
    urls = [upstream.base_url for upstream in upstreams.values()]
    with Router(urls, policy, folder / "router.log") as router:
        yield router


@pytest.fixture(scope="module")
def front(
    router: Router, upstreams: dict[str, Upstream], folder: Path
) -> Iterator[Front]:
    """Before the router, and it knows the replicas."""
    urls = [upstream.base_url for upstream in upstreams.values()]
    with Front(router.base_url, urls, folder / "front.log") as front:
        yield front


@pytest.fixture(scope="module")
def direct(upstreams: dict[str, Upstream], folder: Path) -> Iterator[Front]:
    """Before one upstream with four data-parallel ranks, and no router."""
    with Front(
        upstreams["left"].base_url, (), folder / "direct.log", ("--ranks", "4")
    ) as front:
        yield front
