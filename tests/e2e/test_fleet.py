"""Two real replicas above one LMCache server, behind a real vllm-router.

What a client sees when its replica is drained or dies, and of `ttlcache front`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.compare.fleet.cluster import Cluster
from bench.compare.fleet.front import Front
from bench.compare.fleet.router import Router
from bench.serve.server import ServerOptions, VLLMServer, by_label, total
from tests.e2e.conftest import HANG_S, Agent
from tests.e2e.loads import BLOCK, KEPT, first_prompt, tool_result

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]

PROGRAMS = 10
#: Attempts at what a busy machine disturbs: an answer of LMCache later than 2 s.
MAX_ATTEMPTS = 3


class Fleet:
    """What clients do to a fleet, through a router."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster = cluster
        self.folder = folder

    def router(self, name: str) -> Router:
        log = self.folder / f"router-{name}.log"
        return Router(self.cluster.urls, "consistent_hash", log)

    def first(self, router: Router, index: int, name: str, **hints: Any) -> Any:
        hints = {"tool": "bash", "ttl": "300s", **hints}
        return ask(router, name, index, first_prompt(index), hints)

    def second(self, router: Router, first: Any, index: int, name: str) -> Any:
        prompt = first["context"] + tool_result(index)
        return ask(router, name, index, prompt, {"is_last_step": True})

    def index(self, answer: dict[str, Any]) -> int:
        return int(answer["model"].removeprefix("replica-"))

    def settled(self, condition: Callable[[], bool]) -> bool:
        """Polls, and pokes the living replicas: an idle engine does not step."""
        deadline = time.monotonic() + HANG_S
        while time.monotonic() < deadline:
            if condition():
                return True
            for server in self.cluster.living:
                Agent(server).settle()
            time.sleep(0.1)
        return False

    def chunks(self) -> int:
        assert self.cluster.tiers is not None
        return self.cluster.tiers.cpu_chunks()

    def misses(self) -> float:
        """Outages and failed reloads, which a busy machine has by itself."""
        return sum(
            total(server.metrics(), name)
            for server in self.cluster.living
            for name in ("ttlcache_failed_reloads_total", "ttlcache_tier_outages_total")
        )


def reloads(server: VLLMServer) -> float:
    return by_label(server.metrics(), "ttlcache_reloads_total", "tier").get("cpu", 0.0)


def body(
    name: str, prompt: list[int], hints: dict[str, Any], max_tokens: int
) -> dict[str, Any]:
    """Each test has a salt of its own: it finds nothing that another one computed."""
    return {
        "cache_salt": name,
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": max_tokens,
        "min_tokens": max_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "return_token_ids": True,
        "kv_transfer_params": {"ttlcache": hints},
    }


def ask(
    entry: Router | Front,
    name: str,
    index: int | None,
    prompt: list[int],
    hints: dict[str, Any],
) -> dict[str, Any]:
    """One turn as an agent's client makes it: a failed request is sent again."""
    deadline = time.monotonic() + HANG_S
    headers = {} if index is None else {"X-Session-ID": f"{name}-{index}"}
    failed = 0
    while True:
        try:
            answer = httpx.post(
                f"{entry.base_url}/v1/completions",
                json=body(name, prompt, hints, 8),
                headers=headers,
                timeout=HANG_S,
            )
            if answer.status_code == 200:
                break
            reason = answer.text
        except httpx.TransportError as error:
            reason = repr(error)
        failed += 1
        assert time.monotonic() < deadline, reason
        time.sleep(0.5)
    answered = answer.json()
    choice = answered["choices"][0]
    cached = answered["usage"]["prompt_tokens_details"]["cached_tokens"]
    return {
        "model": answered["model"],
        "token_ids": choice["token_ids"],
        "context": [*prompt, *choice["token_ids"]],
        "cached_tokens": cached,
        "failed": failed,
    }


@pytest.fixture(scope="module")
def fleet(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("fleet")
    options = ServerOptions(num_blocks=300, max_model_len=4096, max_num_seqs=8)
    config = {
        "policy": "fixed",
        "policy_options": {"ttl_s": 300.0},
        "demote": "write-through",
        "debug_invariants": True,
        # By default an answer of LMCache later than 2 s is a miss; here it is a busy
        # machine.
        "lmcache.mp.mq_timeout": 60.0,
    }
    with Cluster(tiny_model, options, 2, config, 0.25, folder) as cluster:
        yield Fleet(cluster, folder)
        for server in cluster.living:
            assert total(server.metrics(), "ttlcache_hook_errors_total") == 0
            assert server.errors_in_log() == []


@pytest.fixture(scope="module")
def expected(fleet: Fleet) -> list[list[list[int]]]:
    """Both turns of every program from one replica, asked directly, with no cache."""
    agent = Agent(fleet.cluster.replicas[0])
    answers = []
    for index in range(PROGRAMS):
        first = agent.ask(first_prompt(index), cache_salt=f"alone-{index}")
        prompt = first["context"] + tool_result(index)
        second = agent.ask(prompt, cache_salt=f"again-{index}")
        assert first["cached_tokens"] == second["cached_tokens"] == 0
        answers.append([first["token_ids"], second["token_ids"]])
    return answers


def first_turns(fleet: Fleet, router: Router, name: str) -> list[dict[str, Any]]:
    """All programs' first turns, when LMCache holds them whole."""
    wanted = fleet.chunks() + PROGRAMS * KEPT // BLOCK
    with ThreadPoolExecutor(4) as pool:
        indices = range(PROGRAMS)
        firsts = list(pool.map(lambda i: fleet.first(router, i, name), indices))
    assert fleet.settled(lambda: fleet.chunks() >= wanted), fleet.chunks()
    return firsts


def test_programs_of_a_drained_replica_go_on_elsewhere(fleet, expected):
    """Drained: the router sends it nothing more, its pins end one by one.

    The programs' KV is in the shared tier, so their next turns prefill only what is
    new. Programs of the other replica notice nothing.
    """
    with fleet.router("drain") as router:
        firsts = first_turns(fleet, router, "drain")
        old = fleet.index(firsts[0])
        drained, other = fleet.cluster.replicas[old], fleet.cluster.replicas[1 - old]
        router.remove(drained.base_url)
        assert total(drained.metrics(), "ttlcache_pins_active") > 0
        moved = [i for i in range(PROGRAMS) if fleet.index(firsts[i]) == old]
        for index in moved:
            end = httpx.post(
                f"{drained.base_url}/ttlcache/programs/drain-{index}/end",
                json={"cache_salt": "drain"},
                timeout=HANG_S,
            )
            assert end.json()["known"]
        assert fleet.settled(
            lambda: total(drained.metrics(), "ttlcache_pinned_blocks") == 0
        )
        came, missed = reloads(other), fleet.misses()
        for index, first in enumerate(firsts):
            second = fleet.second(router, first, index, "drain")
            assert fleet.index(second) == 1 - old
            assert second["token_ids"] == expected[index][1]
            if fleet.misses() == missed:
                assert second["cached_tokens"] == KEPT
        if fleet.misses() == missed:
            assert fleet.settled(lambda: reloads(other) == came + len(moved))


def test_pins_of_a_drained_replica_expire_by_themselves(fleet):
    """Nobody has to tell it: deadlines do."""
    with fleet.router("expire") as router:
        first = fleet.first(router, 40, "expire", ttl="2s")
        drained = fleet.cluster.replicas[fleet.index(first)]
        before = by_label(drained.metrics(), "ttlcache_pins_total", "outcome")
        router.remove(drained.base_url)
        assert fleet.settled(
            lambda: (
                by_label(drained.metrics(), "ttlcache_pins_total", "outcome")["expired"]
                > before.get("expired", 0)
            )
        )


def test_unchanged_clients_stay_with_their_replica(fleet):
    """No id anywhere: the front keeps them apart for the router, prefixes here."""
    with (
        fleet.router("front") as router,
        Front(router.base_url, fleet.cluster.urls, fleet.folder / "front.log") as front,
    ):

        def identified(rule: str) -> float:
            name = "ttlcache_turns_identified_total"
            samples = [server.metrics() for server in fleet.cluster.living]
            return sum(by_label(s, name, "rule").get(rule, 0.0) for s in samples)

        by_prefix, by_session = identified("prefix"), identified("session")
        homes: dict[int, set[str]] = {}
        contexts = {i: first_prompt(60 + i) for i in range(PROGRAMS)}
        for turn in range(3):
            for index, prompt in contexts.items():
                answer = ask(front, "front", None, prompt, {})
                homes.setdefault(index, set()).add(answer["model"])
                contexts[index] = answer["context"] + tool_result(index + turn)
                if turn:
                    assert answer["cached_tokens"] >= KEPT
        assert all(len(home) == 1 for home in homes.values())
        assert identified("prefix") == by_prefix + 2 * PROGRAMS
        assert identified("session") == by_session


def test_claude_codes_session_reaches_the_replica(fleet):
    """vllm-router drops its header on the way; the front has put it into the body."""
    with (
        fleet.router("claude") as router,
        Front(router.base_url, (), fleet.folder / "front-claude.log") as front,
    ):
        answer = httpx.post(
            f"{front.base_url}/v1/messages",
            headers={"X-Claude-Code-Session-Id": "claude-1"},
            json={
                "model": "tiny",
                "max_tokens": 4,
                "messages": [{"role": "user", "content": "go on"}],
            },
            timeout=HANG_S,
        )
        assert answer.status_code == 200, answer.text
        known = [
            program["program"]
            for server in fleet.cluster.living
            for engine in httpx.get(
                f"{server.base_url}/ttlcache/programs", timeout=HANG_S
            ).json()["engines"]
            for program in engine["programs"]
        ]
        assert known.count("claude-1") == 1


def test_a_killed_replica_takes_no_program_along(fleet, expected):
    """SIGKILL in the middle of a stream; nothing is prefilled that LMCache holds."""
    for attempt in range(MAX_ATTEMPTS):
        with fleet.router(f"kill-{attempt}") as router:
            if kill_one(fleet, router, f"kill-{attempt}", expected):
                return
        fleet.cluster.revive(next(iter(fleet.cluster.killed)))
    raise AssertionError("LMCache never answers in time")


def kill_one(
    fleet: Fleet, router: Router, name: str, expected: list[list[list[int]]]
) -> bool:
    """False where LMCache was late once, and the tokens prefilled again."""
    firsts = first_turns(fleet, router, name)
    victim = fleet.index(firsts[0])
    survivor = fleet.cluster.replicas[1 - victim]
    came, missed = reloads(survivor), fleet.misses()
    with httpx.stream(
        "POST",
        f"{router.base_url}/v1/completions",
        json=body(name, first_prompt(0), {"is_last_step": True}, 3000)
        | {"stream": True},
        headers={"X-Session-ID": f"{name}-0"},
        timeout=HANG_S,
    ) as stream:
        lines = stream.iter_lines()
        begun = json.loads(next(lines).removeprefix("data: "))
        assert begun["model"] == f"replica-{victim}"
        fleet.cluster.kill(victim)
        with pytest.raises(httpx.RemoteProtocolError):
            list(lines)
    with ThreadPoolExecutor(4) as pool:
        seconds = list(
            pool.map(
                lambda i: fleet.second(router, firsts[i], i, name), range(PROGRAMS)
            )
        )
    assert {fleet.index(second) for second in seconds} == {1 - victim}
    assert [s["token_ids"] for s in seconds] == [e[1] for e in expected[:PROGRAMS]]
    if fleet.misses() != missed:
        return False
    assert [s["cached_tokens"] for s in seconds] == [KEPT] * PROGRAMS
    moved = sum(fleet.index(first) == victim for first in firsts)
    assert moved
    assert fleet.settled(lambda: reloads(survivor) == came + moved)
    return True
