"""What the front asks replicas: seldom, once at a time, and whatever they answer."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.commands import output_of
from tests.front.conftest import HANG_S, front_before
from ttlcache.cli import app
from ttlcache_connector.front import replicas as replicas_module
from ttlcache_connector.front.replicas import Replicas, gauge

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(HANG_S)]

URLS = ("http://busy", "http://idle")
WAITING = "vllm:num_requests_waiting"


def asking(answer: Callable[[httpx.Request], Any], urls: Any = URLS) -> Replicas:
    """Replicas that `answer` stands in for."""
    client = httpx.AsyncClient(transport=httpx.MockTransport(answer))
    return Replicas(urls, client=client)


class Fleet:
    """Two replicas: one over its bound, which holds `programs`."""

    def __init__(self) -> None:
        self.programs: object = {"engines": [{"programs": [{"program": "p"}]}]}
        self.asked = 0
        self.replicas = asking(self.handle)

    async def handle(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/metrics":
            waiting = 20 if request.url.host == "busy" else 0
            return httpx.Response(200, text=f"{WAITING} {waiting}")
        self.asked += 1
        if self.programs is None:
            raise httpx.ConnectError("gone")
        return httpx.Response(200, text=json.dumps(self.programs))

    async def is_over(self, program: str = "p") -> bool:
        await self.replicas.read()
        return self.replicas.is_over(program)


@pytest.fixture
def fleet():
    return Fleet()


async def test_an_answer_is_good_until_the_next_reading(fleet):
    """A busy replica is not asked by each of its programs' children."""
    assert await fleet.is_over("p")
    assert not fleet.replicas.is_over("q")
    assert fleet.asked == 1
    for none in ({"engines": []}, None):
        fleet.programs = none
        assert not await fleet.is_over("p")
    assert fleet.asked == 3


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
async def test_an_answer_that_is_not_ours_names_nobody(fleet, programs):
    fleet.programs = programs
    assert not await fleet.is_over("p")
    assert fleet.replicas.faults == 0


def test_a_gauge_is_summed_over_its_labels():
    text = (
        "# HELP x_waiting of x\nx_waiting_total 9\n"
        'x_waiting{engine="0"} 2.0\nx_waiting{engine="1"} 3.5\n'
    )
    assert gauge(text, "x_waiting") == 5.5
    assert gauge(text, "y_waiting") is None


@pytest.mark.parametrize(
    ("busy", "idle", "expected"),
    [
        (20, 0, True),
        (8, 0, False),  # the bound itself is allowed
        (20, 20, False),  # no other one is better off
        (0, 20, False),  # the parent is at the idle one
        (20, None, False),  # the other one does not answer
        (None, None, False),
        ("404", "404", False),
        ("500", "500", False),
    ],
)
async def test_only_the_parents_replica_counts(busy, idle, expected):
    def answer(request: httpx.Request) -> httpx.Response:
        waiting = busy if request.url.host == "busy" else idle
        if waiting is None:
            raise httpx.ConnectError("nobody there")
        if isinstance(waiting, str):
            return httpx.Response(int(waiting), text="what?")
        if request.url.path == "/metrics":
            return httpx.Response(200, text=f"{WAITING} {waiting}")
        programs = [{"program": "p"}] if request.url.host == "busy" else []
        return httpx.Response(200, json={"engines": [{"programs": programs}]})

    replicas = asking(answer)
    await replicas.read()
    assert replicas.is_over("p") is expected


@pytest.mark.parametrize("error", [httpx.InvalidURL("x"), RuntimeError("a bug")])
async def test_the_watch_goes_on_whatever_happens(error, caplog, monkeypatch):
    monkeypatch.setattr(replicas_module, "EVERY_S", 0.0)
    asked = {"busy": 0, "idle": 0}

    def handle(request: httpx.Request) -> httpx.Response:
        asked[request.url.host] += 1
        if request.url.host == "busy" and asked["busy"] <= 3:
            raise error
        return httpx.Response(200, text=f"{WAITING} 1")

    replicas = asking(handle)
    async with replicas.watching():
        while len(replicas.pressure) < 2:
            await asyncio.sleep(0)
        assert replicas.faults == 3
    assert len([r for r in caplog.records if r.levelname == "WARNING"]) == 1


async def test_the_status_shows_no_password(caplog):
    def handle(request: httpx.Request) -> httpx.Response:
        if request.url.host == "idle":
            raise RuntimeError("a bug")
        if request.url.host == "closed":
            return httpx.Response(401)
        return httpx.Response(200, text=f"{WAITING} 1")

    caplog.set_level(logging.DEBUG, logger=replicas_module.__name__)
    names = ["busy:80/base/", "idle", "closed"]
    replicas = asking(handle, [f"http://me:secret@{name}" for name in names])
    await replicas.read()
    assert replicas.status() == {"http://busy/base": 1.0}
    assert "http://idle" in caplog.text
    assert "http://closed/metrics: HTTPStatusError" in caplog.text
    own = [r for r in caplog.records if r.name == replicas_module.__name__]
    assert len(own) == 2
    formatter = logging.Formatter()
    assert not any("secret" in formatter.format(record) for record in own)


# --- the command -------------------------------------------------------------

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
        printed = output_of(app, "front", *args, status=2)
        for part in (key, repr(value), "expected", "http://127.0.0.1:8000"):
            assert part in printed


@pytest.mark.parametrize(
    "value",
    ["http://x", "https://x/base/", "http://[::1]:80", "http://a_b:1", "HTTP://X"],
)
def test_others_are_taken(value):
    front_before(url=value)
    Replicas([value])


def test_idle_connections_stay_as_long_as_told(monkeypatch):
    """A load balancer that keeps them longer sends a turn into a closed one."""
    told: dict[str, Any] = {}
    monkeypatch.setattr("uvicorn.run", lambda _, **options: told.update(options))
    output_of(app, "front", "--upstream", "http://x", "--keep-alive-s", "75")
    assert told["timeout_keep_alive"] == 75


def test_without_its_extra_the_front_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    printed = output_of(app, "front", "--upstream", "http://x", status=1)
    assert "pip install 'ttlcache[fleet]'" in printed
