"""What the front asks replicas: seldom, once at a time, and whatever they answer."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Callable
from typing import Any

import anyio
import httpx
import pytest
from typer.testing import CliRunner

from tests.front.conftest import run
from ttlcache.cli import app
from ttlcache.clock import VirtualClock
from ttlcache.errors import ConfigError
from ttlcache_connector.front import replicas as replicas_module
from ttlcache_connector.front.app import Front
from ttlcache_connector.front.replicas import PressureBound, Replicas

URLS = ("http://busy", "http://idle")
BOUND = PressureBound(every_s=2.0)


class Fleet:
    """Two replicas: one over its bound, which holds `programs`."""

    def __init__(self) -> None:
        self.programs: object = {"engines": [{"programs": [{"program": "p"}]}]}
        self.asked = 0
        self.answers = anyio.Event()
        self.answers.set()

    async def handle(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/metrics":
            waiting = 20 if request.url.host == "busy" else 0
            return httpx.Response(200, text=f"vllm:num_requests_waiting {waiting}")
        self.asked += 1
        await self.answers.wait()
        if self.programs is None:
            raise httpx.ConnectError("gone")
        return httpx.Response(200, text=json.dumps(self.programs))


def over(fleet: Fleet, story: Callable[[Replicas, VirtualClock], Any]) -> None:
    async def within() -> None:
        clock = VirtualClock()
        transport = httpx.MockTransport(fleet.handle)
        async with httpx.AsyncClient(transport=transport) as client:
            replicas = Replicas(URLS, BOUND, client=client, clock=clock)
            await replicas.read()
            await story(replicas, clock)

    run(within)


def test_an_answer_is_good_for_a_while():
    fleet = Fleet()

    async def story(replicas: Replicas, clock: VirtualClock) -> None:
        for _ in range(50):
            assert await replicas.is_over("p")
            assert not await replicas.is_over("q")
        assert fleet.asked == 1
        clock.advance(BOUND.every_s)
        fleet.programs = {"engines": []}
        assert not await replicas.is_over("p")
        assert fleet.asked == 2

    over(fleet, story)


def test_so_is_none():
    """A replica too busy to answer is not asked by each of its programs' children."""
    fleet = Fleet()
    fleet.programs = None

    async def story(replicas: Replicas, clock: VirtualClock) -> None:
        assert not any([await replicas.is_over("p") for _ in range(50)])
        assert fleet.asked == 1

    over(fleet, story)


def test_one_question_at_a_time():
    fleet = Fleet()
    fleet.answers = anyio.Event()
    found: list[bool] = []

    async def story(replicas: Replicas, clock: VirtualClock) -> None:
        async def child() -> None:
            found.append(await replicas.is_over("p"))

        async with anyio.create_task_group() as tasks:
            for _ in range(50):
                tasks.start_soon(child)
            await anyio.wait_all_tasks_blocked()
            assert fleet.asked == 1
            fleet.answers.set()
        assert (found, fleet.asked) == ([True] * 50, 1)

    over(fleet, story)


def test_a_client_that_leaves_costs_the_others_nothing():
    """The one whose request asks goes; the next one in line asks again."""
    fleet = Fleet()
    fleet.answers = anyio.Event()
    found: list[bool] = []

    async def story(replicas: Replicas, clock: VirtualClock) -> None:
        async def child() -> None:
            found.append(await replicas.is_over("p"))

        first = asyncio.create_task(child())
        await anyio.wait_all_tasks_blocked()
        second = asyncio.create_task(child())
        await anyio.wait_all_tasks_blocked()
        first.cancel()
        await anyio.wait_all_tasks_blocked()
        fleet.answers.set()
        await second
        assert (found, fleet.asked) == ([True], 2)

    over(fleet, story)


@pytest.mark.parametrize(
    "programs",
    [
        [],
        "text",
        {"engines": 5},
        {"engines": [5, {"programs": 5}, {"programs": [5, {}]}]},
        {"engines": {"programs": "p"}},
        {"engines": [{"programs": [{"program": ["p"]}]}]},
    ],
)
def test_an_answer_that_is_not_ours_names_nobody(programs):
    fleet = Fleet()
    fleet.programs = programs

    async def story(replicas: Replicas, clock: VirtualClock) -> None:
        assert not await replicas.is_over("p")
        assert replicas.faults == 0

    over(fleet, story)


@pytest.mark.parametrize("error", [httpx.InvalidURL("x"), RuntimeError("a bug")])
def test_the_watch_goes_on_whatever_happens(error, caplog):
    asked = {"busy": 0, "idle": 0}

    def handle(request: httpx.Request) -> httpx.Response:
        asked[request.url.host] += 1
        if request.url.host == "busy" and asked["busy"] <= 3:
            raise error
        return httpx.Response(200, text="vllm:num_requests_waiting 1")

    async def story() -> None:
        client = httpx.AsyncClient(transport=httpx.MockTransport(handle))
        replicas = Replicas(URLS, PressureBound(every_s=0.0), client=client)
        async with replicas.watching():
            while len(replicas.pressure) < 2:
                await asyncio.sleep(0)
            assert replicas.faults == 3

    run(story)
    assert len([r for r in caplog.records if r.levelname == "WARNING"]) == 1


def test_the_status_shows_no_password(caplog):
    def handle(request: httpx.Request) -> httpx.Response:
        if request.url.host == "idle":
            raise RuntimeError("a bug")
        if request.url.host == "closed":
            return httpx.Response(401)
        return httpx.Response(200, text="vllm:num_requests_waiting 1")

    caplog.set_level(logging.DEBUG, logger=replicas_module.__name__)

    async def story() -> None:
        client = httpx.AsyncClient(transport=httpx.MockTransport(handle))
        names = ["busy:80/base/", "idle", "closed"]
        urls = [f"http://me:secret@{name}" for name in names]
        replicas = Replicas(urls, PressureBound(), client=client)
        await replicas.read()
        assert replicas.status() == {"http://busy/base": 1.0}

    run(story)
    assert "http://idle" in caplog.text
    assert "http://closed/metrics: HTTPStatusError" in caplog.text
    own = [r for r in caplog.records if r.name == replicas_module.__name__]
    assert len(own) == 2
    formatter = logging.Formatter()
    assert not any("secret" in formatter.format(record) for record in own)


WRONG = [
    "",
    "router:30000",
    "127.0.0.1:8000",
    "htp://x",
    "http://",
    "http://:8000",
    "http://[",
    "http://x:abc",
    "http://x:99999",
    "http://x y",
    "http://x\n/",
    "http://x?a=1",
]


@pytest.mark.parametrize("value", WRONG)
def test_urls_that_cannot_be_asked_are_refused_at_start(value, monkeypatch):
    monkeypatch.setattr("uvicorn.run", lambda *_, **__: pytest.fail("it starts"))
    for key, args in {
        "--upstream": ["--upstream", value],
        "--replica": ["--upstream", "http://x", "--replica", value],
    }.items():
        done = CliRunner().invoke(app, ["front", *args], env={"COLUMNS": "300"})
        assert done.exit_code == 2
        for part in (key, repr(value), "expected", "http://127.0.0.1:8000"):
            assert part in done.output


def test_idle_connections_stay_as_long_as_told(monkeypatch):
    """A load balancer that keeps them longer sends a turn into a closed one."""
    told: dict[str, Any] = {}
    monkeypatch.setattr("uvicorn.run", lambda _, **options: told.update(options))
    args = ["front", "--upstream", "http://x", "--keep-alive-s", "75"]
    assert CliRunner().invoke(app, args).exit_code == 0
    assert told["timeout_keep_alive"] == 75


def test_without_its_extra_the_front_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    done = CliRunner().invoke(app, ["front", "--upstream", "http://x"])
    assert done.exit_code == 1
    assert "pip install 'ttlcache[fleet]'" in done.output


@pytest.mark.parametrize(
    "value",
    ["http://x", "https://x/base/", "http://[::1]:80", "http://a_b:1", "HTTP://X"],
)
def test_others_are_taken(value):
    try:
        Front(value, Replicas([value], BOUND))
    except ConfigError as error:
        pytest.fail(str(error))
