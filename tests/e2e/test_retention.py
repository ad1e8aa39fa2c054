"""A real vLLM tells a real LMCache server what it decided (`serve-tiers --retention`).

Written through, so that a turn's KV is in L1 as soon as it is computed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lmcache", reason="LMCache is an extra")

from bench.serve.tier_server import TierServer
from bench.serve.tiny_model import DEFAULT_SHAPE
from tests.e2e.conftest import Agent, start_server
from ttlcache_connector.lmcache_server.launch import TierOptions

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]

CHUNK = 32
PROMPT_TOKENS = 200
KEPT = PROMPT_TOKENS // CHUNK
TTL_S = 120.0
#: L1 holds so many contexts.
CONTEXTS = 8
PATIENCE_S = 120.0


def prompt(index: int) -> list[int]:
    return [5 + (index * 7919 + i * i * 31) % 2000 for i in range(PROMPT_TOKENS)]


@dataclass
class Told:
    """The engine, the server below it, and what the server says that it heard."""

    agent: Agent
    tiers: TierServer

    def turn(self, index: int, name: str, **hints: Any) -> dict[str, Any]:
        hints = {"program_id": name, "tool": "bash"} | hints
        headers = {"X-Request-Id": f"request-{name}"}
        return self.agent.ask(prompt(index), hints=hints, headers=headers)

    @property
    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = self.tiers.status()["ttlcache"]
        return found

    def heard(self, name: str) -> dict[str, Any] | None:
        for each in self.status["recent_turns"]:
            if f"request-{name}-" in f"{each['request_id']}-":
                found: dict[str, Any] = each
                return found
        return None

    def hears(self, name: str) -> dict[str, Any]:
        """Once all of the turn's chunks are known, too."""
        found: list[dict[str, Any] | None] = [None]

        def is_there() -> bool:
            found[0] = self.heard(name)
            return found[0] is not None and found[0]["chunks"] >= KEPT

        assert becomes_true(is_there), (found, self.status)
        assert found[0] is not None
        return found[0]


def becomes_true(check: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if check():
            return True
        time.sleep(0.1)
    return check()


@pytest.fixture(scope="module")
def told(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Told]:
    folder = tmp_path_factory.mktemp("retention")
    l1_bytes = CONTEXTS * KEPT * CHUNK * DEFAULT_SHAPE.kv_bytes_per_token
    options = TierOptions(cpu_gb=l1_bytes / 2**30, chunk_tokens=CHUNK, retention=True)
    with TierServer(options, folder / "lmcache.log") as tiers:
        extra = {
            "policy": "fixed",
            "policy_options": {"ttl_s": TTL_S},
            "demote": "write-through",
            **tiers.options.connector_config(),
            "lmcache.mp.mq_timeout": 60.0,  # a busy machine is no outage
        }
        log = folder / "vllm.log"
        with start_server(tiny_model, log, extra, num_blocks=400) as server:
            agent = Agent(server)
            yield Told(agent, tiers)
            assert agent.count("ttlcache_hook_errors_total") == 0
            assert server.errors_in_log() == []
            assert tiers.status()["ttlcache"]["errors"] == {}


def test_the_deadline_on_the_server_is_the_connectors(told):
    told.turn(1, "policy")
    told.turn(2, "wish", ttl="200s")
    policy, wish = told.hears("policy"), told.hears("wish")
    assert (policy["ttl_s"], policy["is_told"]) == (TTL_S, False)
    assert (wish["ttl_s"], wish["is_told"]) == (200.0, True)
    assert policy["is_kept"]
    assert 0.0 < policy["left_s"] <= TTL_S


def test_a_claimed_turn_renews_its_programs_deadline(told):
    """Its KV is in GPU memory: it looks nothing up, and only the hint tells."""
    first = told.turn(3, "first", ttl="150s", program_id="grows")
    told.hears("first")
    claimed = told.agent.pins("claimed")
    hints = {"program_id": "grows", "tool": "bash", "ttl": "250s"}
    headers = {"X-Request-Id": "request-second"}
    longer = first["context"] + prompt(4)[:100]
    told.agent.ask(longer, hints=hints, headers=headers)
    assert told.agent.pins("claimed") == claimed + 1
    before = told.status["programs"]
    second = told.hears("second")
    assert second["ttl_s"] == 250.0
    assert second["chunks"] > KEPT
    assert told.status["programs"] == before
    assert told.hears("first")["left_s"] > 150.0, "one program, one deadline"


def test_finished_programs_go_first_and_deadlines_hold(told):
    """LRU would give up `kept` first: it is the longest unused."""
    told.turn(10, "kept", ttl="280s")
    told.turn(11, "done", is_last_step=True)
    done = told.hears("done")
    assert done["is_finished"]
    assert not done["is_kept"]
    evicted = told.status["counts"].get("evicted", 0)
    for index in range(3 * CONTEXTS):
        told.turn(20 + index, f"later-{index}", ttl="0.1s")
    told.hears(f"later-{3 * CONTEXTS - 1}")
    gone = told.status["counts"].get("evicted", 0) - evicted
    assert gone > CONTEXTS * KEPT
    told.agent.empty_gpu()
    assert told.turn(10, "kept")["cached_tokens"] == KEPT * CHUNK
    assert told.turn(11, "done-again")["cached_tokens"] == 0


def test_a_program_that_a_client_ends_is_finished_below(told):
    told.turn(50, "ends", ttl="200s")
    assert told.hears("ends")["is_kept"]
    answer = told.agent.http.post("/ttlcache/programs/ends/end")
    assert answer.status_code == 200, answer.text
    assert becomes_true(lambda: told.hears("ends")["is_finished"])
