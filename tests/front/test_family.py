"""Sub-agents follow their parent, unless its replica has too much to do."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from bench.compare.fleet.front import Front
from tests.front.conftest import HANG_S
from tests.waiting import becomes
from ttlcache_connector.front.keys import Route
from ttlcache_connector.front.replicas import PressureBound, Replicas, gauge
from ttlcache_connector.front.routes import Family

CHAT = "/v1/chat/completions"
MESSAGES = {"model": "tiny", "messages": [{"role": "user", "content": "the same"}]}


class Pressure:
    def __init__(self) -> None:
        self.over: set[str] = set()
        self.asked = 0

    async def __call__(self, program: str) -> bool:
        self.asked += 1
        return program in self.over


def test_a_childs_first_turn_decides_for_all_of_them():
    pressure = Pressure()
    family = Family(pressure)

    async def key(name: str, parent: str | None) -> str | None:
        return await family.key(Route("hint", name, name, parent))

    async def story() -> None:
        assert await key("a", "p") == "p"
        assert await key("grandchild", "a") == "p"
        pressure.over.add("p")
        assert await key("b", "p") == "b"
        assert await key("a", "p") == "p", "its KV is there"
        pressure.over.clear()
        assert await key("b", "p") == "b", "its KV is there"
        assert await key("b", None) == "b"
        assert await key("a", None) == "p", "a turn that does not tell its parent"
        assert await key("p", "p") == "p"
        assert pressure.asked == 3

    asyncio.run(story())
    assert family.sent_away == 1
    assert family.of("a") == family.of("p") == "p"


@pytest.mark.parametrize("parent", ["p", None])
def test_what_is_remembered_has_a_bound(parent):
    family = Family(Pressure(), max_children=10)
    for number in range(100):
        name = f"c{number}"
        key = asyncio.run(family.key(Route("hint", name, name, parent)))
        assert key == (parent or name)
    assert asyncio.run(family.key(Route())) is None
    assert len(family) == 10
    assert family.of("c99") == (parent or "c99")


def test_nobody_sends_another_ones_program_away():
    family = Family(Pressure())

    async def key(name: str, parent: str | None, tenant: str = "") -> str | None:
        return await family.key(Route("hint", name, name, parent), tenant)

    async def story() -> None:
        assert await key("victim", None) == "victim"
        assert await key("victim", "attacker") == "victim", "it was no child before"
        assert await key("later", "attacker", "A") == "attacker"
        assert await key("later", None, "B") == "later", "another tenant's"

    asyncio.run(story())
    assert family.of("later", "B") == "later"
    assert family.of("later", "A") == "attacker"


def test_a_gauge_is_summed_over_its_labels():
    text = (
        "# HELP x_waiting of x\nx_waiting_total 9\n"
        'x_waiting{engine="0"} 2.0\nx_waiting{engine="1"} 3.5\n'
    )
    assert gauge(text, "x_waiting") == 5.5
    assert gauge(text, "y_waiting") is None


@pytest.mark.parametrize(
    ("waiting", "expected"),
    [
        ((20, 0), True),
        ((8, 0), False),  # the bound itself is allowed
        ((20, 20), False),  # no other one is better off
        ((0, 20), False),  # the parent is at the idle one
        ((20, None), False),  # the other one does not answer
    ],
)
def test_only_the_parents_replica_counts(waiting, expected):
    def answer(request: httpx.Request) -> httpx.Response:
        number = 0 if request.url.host == "one" else 1
        if waiting[number] is None:
            raise httpx.ConnectError("nobody there")
        if request.url.path == "/metrics":
            return httpx.Response(
                200, text=f"vllm:num_requests_waiting {waiting[number]}"
            )
        programs = [{"program": "p"}] if number == 0 else []
        return httpx.Response(200, json={"engines": [{"programs": programs}]})

    assert asked(answer) is expected


@pytest.mark.parametrize("status", [404, 500, None])
def test_replicas_that_do_not_answer_are_under_no_pressure(status):
    def answer(request: httpx.Request) -> httpx.Response:
        if status is None:
            raise httpx.ConnectError("nobody there")
        return httpx.Response(status, text="what?")

    assert asked(answer) is False


def asked(answer: Any) -> bool:
    async def ask() -> bool:
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
            urls = ("http://one", "http://two")
            replicas = Replicas(urls, PressureBound(), client=client)
            await replicas.read()
            return await replicas.is_over("p")

    return asyncio.run(ask())


def test_through_the_router(front: Front, upstreams):
    """All children land at the parent's replica; under pressure others land apart."""

    def turn(name: str, parent: str | None = None) -> str:
        hints = {"program_id": name} | ({"parent_id": parent} if parent else {})
        body = MESSAGES | {"kv_transfer_params": {"ttlcache": hints}}
        answer = httpx.post(f"{front.base_url}{CHAT}", json=body, timeout=HANG_S)
        return answer.json()["name"]

    def state(name: str, **facts: Any) -> None:
        httpx.post(f"{upstreams[name].base_url}/state", json=facts, timeout=HANG_S)

    def pressure() -> list[float]:
        status = httpx.get(f"{front.base_url}/front/status", timeout=HANG_S).json()
        return sorted(status["pressure"].values())

    home = turn("family")
    early = {turn(f"early-{i}", "family") for i in range(20)}
    assert early == {home}
    state(home, waiting=50, programs=["family"])
    assert becomes(lambda: pressure() == [0.0, 50.0], HANG_S)
    late = [turn(f"late-{i}", "family") for i in range(20)]
    assert set(late) == {"left", "right"}, "by their own id now"
    assert {turn(f"early-{i}", "family") for i in range(20)} == {home}
    state(home, waiting=0, programs=[])
    assert becomes(lambda: pressure() == [0.0, 0.0], HANG_S)
    assert [turn(f"late-{i}", "family") for i in range(20)] == late
