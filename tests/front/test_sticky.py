"""The router's `--policy sticky_least_loaded`: what docs/fleet.md says of it.

Two light upstreams stand in for vLLM: this is about routing alone.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable

import httpx
import pytest

from bench.compare.fleet.router import STICKY_IDLE, Router
from tests.front.conftest import HANG_S

(EXPIRATION,) = STICKY_IDLE
PROGRAMS = 20


class Client:
    """Turns of programs through one router; who served them."""

    def __init__(self, router: Router) -> None:
        self.router = router

    def turn(self, program: str) -> str:
        answer = httpx.post(
            f"{self.router.base_url}/v1/chat/completions",
            headers={"X-Session-ID": program},
            json={"model": "tiny", "messages": []},
            timeout=HANG_S,
        )
        assert answer.status_code == 200, answer.text
        return str(answer.json()["name"])

    def turns(self, programs: Iterable[str]) -> dict[str, str]:
        return {program: self.turn(program) for program in programs}

    def finish(self, program: str) -> None:
        url = f"{self.router.base_url}/finish_session"
        told = {"session_id": program}
        httpx.post(url, params=told, timeout=HANG_S).raise_for_status()


def names(prefix: str, number: int = PROGRAMS) -> list[str]:
    return [f"{prefix}-{index}" for index in range(number)]


@pytest.fixture
def urls(upstreams):
    return {name: upstream.base_url for name, upstream in upstreams.items()}


@pytest.fixture
def client(urls, tmp_path):
    """Before a router that knows of no program yet."""
    log = tmp_path / "router.log"
    with Router(list(urls.values()), "sticky_least_loaded", log) as router:
        yield Client(router)


def test_programs_are_spread_evenly_and_stay(client):
    homes = client.turns(names("p"))
    assert Counter(homes.values()) == {"left": PROGRAMS / 2, "right": PROGRAMS / 2}
    assert client.turns(reversed(list(homes))) == homes


def test_programs_of_a_dead_replica_move_once_and_nobody_sees_an_error(
    client, upstreams
):
    homes = client.turns(names("p"))
    dead = [program for program, home in homes.items() if home == "left"]
    upstreams["left"].stop()
    try:
        assert set(client.turns(dead).values()) == {"right"}
    finally:
        upstreams["left"].__enter__()
    # Its circuit is still open here; that moved programs stay after that: see below.
    assert set(client.turns(homes).values()) == {"right"}


def test_a_replica_that_comes_back_gets_every_new_program_until_it_has_as_many(
    client, urls
):
    homes = client.turns(names("old"))
    client.router.remove(urls["left"])
    old = client.turns(homes)
    assert set(old.values()) == {"right"}
    client.router.add(urls["left"])
    new = client.turns(names("new"))
    assert set(new.values()) == {"left"}
    assert Counter(client.turns(names("even")).values()) == {
        "left": PROGRAMS / 2,
        "right": PROGRAMS / 2,
    }
    assert client.turns(old) == old, "who moved away stays there"


def test_a_program_that_is_told_to_be_over_counts_no_more(client, urls):
    client.router.remove(urls["left"])
    old = client.turns(names("old"))
    client.router.add(urls["left"])
    for program in old:
        client.finish(program)
    homes = Counter(client.turns(names("new")).values())
    assert homes == {"left": PROGRAMS / 2, "right": PROGRAMS / 2}


def test_idle_programs_are_forgotten_after_the_time_that_is_set(urls, tmp_path):
    workers, log = list(urls.values()), tmp_path / "router.log"
    soon = {EXPIRATION: "1"}
    with Router(workers, "sticky_least_loaded", log, extra_env=soon) as router:
        client = Client(router)
        router.remove(urls["left"])
        assert client.turn("idle") == "right"
        assert client.turn("idle, too") == "right"
        router.add(urls["left"])
        time.sleep(1.5)  # longer than the router remembers, on any machine
        assert client.turn("idle") == "left"


def test_routers_do_not_share_what_they_know(urls, tmp_path):
    """Nor does one know after a restart what it knew before."""
    workers = list(urls.values())
    programs = names("p", 40)
    with (
        Router(workers, "sticky_least_loaded", tmp_path / "one.log") as one,
        Router(workers, "sticky_least_loaded", tmp_path / "two.log") as two,
        Router(workers, "consistent_hash", tmp_path / "hash-1.log") as hash_1,
        Router(workers, "consistent_hash", tmp_path / "hash-2.log") as hash_2,
    ):
        backwards = list(reversed(programs))
        homes = Client(one).turns(programs)
        assert Client(two).turns(backwards) != homes
        assert Client(hash_1).turns(programs) == Client(hash_2).turns(backwards)
