"""vLLM's RL flow on a real server: pause, other weights, resume.

All tests have one server, which ends up with the other weights.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.serve.tier_server import TierServer
from bench.serve.tiny_model import build
from tests.e2e.conftest import HANG_S, Agent, start_server
from ttlcache_connector.lmcache_server.launch import TierOptions

pytestmark = pytest.mark.e2e

POOL_BLOCKS = 300
CHUNK = 32
PROMPT = [5 + (i * 7919) % 2000 for i in range(200)]
RESULT = [5 + (i * 104_729) % 2000 for i in range(40)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("weights")


@pytest.fixture(scope="module")
def tiers(folder: Path) -> Iterator[TierServer]:
    options = TierOptions(
        cpu_gb=0.25, disk=folder / "disk", disk_gb=1.0, chunk_tokens=CHUNK
    )
    with TierServer(options, folder / "lmcache.log") as server:
        yield server


@pytest.fixture(scope="module")
def agent(tiers: TierServer, tiny_model: Path, folder: Path) -> Iterator[Agent]:
    extra = {
        "policy": "fixed",
        "policy_options": {"ttl_s": 0.5},
        "max_pinned_fraction": 1.0,
        "debug_invariants": True,
        "demote": "on-expiry",  # nobody needs the memory: nothing would go down
        "lmcache.mp.mq_timeout": 60.0,  # a busy machine is no outage
        **tiers.options.connector_config(),
    }
    log = folder / "vllm.log"
    with start_server(tiny_model, log, extra, num_blocks=POOL_BLOCKS) as server:
        agent = Agent(server)
        yield agent
        assert agent.pins("claimed") == 0
        assert agent.count("ttlcache_reloaded_tokens_total") == 0
        assert agent.count("ttlcache_hook_errors_total") == 0
        assert server.errors_in_log() == []


def ask(agent: Agent, prompt: list[int], program: str, **hints: Any) -> dict[str, Any]:
    # Same tokens, different salts: programs share nothing, here and below.
    about = {"program_id": program, "tool": "bash", **hints}
    return agent.ask(prompt, hints=about, cache_salt=program)


def post(agent: Agent, path: str, **body: Any) -> None:
    answer = agent.http.post(path, json=body or None)
    assert answer.status_code == 200, answer.text


def goes_below(agent: Agent, program: str) -> dict[str, Any]:
    """A turn whose KV is in the tier when this returns."""
    stored = agent.count("ttlcache_demotions_total", "outcome", "stored")
    turn = ask(agent, PROMPT, program)
    deadline = time.monotonic() + HANG_S
    while agent.count("ttlcache_demotions_total", "outcome", "stored") <= stored:
        assert time.monotonic() < deadline
        agent.settle()
    return turn


@pytest.mark.parametrize("reset", ["/reset_prefix_cache?reset_external=true", "/sleep"])
def test_other_ways_to_say_so(agent, reset):
    """The reset that trainers call themselves, and the one that sleep implies."""
    way, ended = reset.strip("/").partition("?")[0], agent.pins("reset")
    goes_below(agent, f"below before {way}")  # or nothing could come back from there
    program = f"pinned before {way}"
    first = ask(agent, PROMPT, program, ttl="300s")
    post(agent, reset)
    if reset == "/sleep":
        post(agent, "/wake_up")
    assert agent.count("ttlcache_pins_active") == 0
    second = ask(agent, [*first["context"], *RESULT], program, is_last_step=True)
    assert second["cached_tokens"] == 0
    assert agent.pins("reset") == ended + 1


def test_after_a_weight_update_no_kv_of_the_old_weights_is_used(agent, tiers, tmp_path):
    new_weights = build(tmp_path / "new", seed=1)
    below = goes_below(agent, "below")
    assert tiers.clear_cpu()  # on disk
    pinned = ask(agent, PROMPT, "pinned", ttl="300s")
    assert pinned["token_ids"] == below["token_ids"]
    assert agent.count("ttlcache_pins_active") == 1
    ended = agent.pins("reset")

    post(agent, "/pause")
    load = {"weights_path": str(new_weights)}
    post(agent, "/collective_rpc", method="reload_weights", kwargs=load)
    post(agent, "/resume")

    turn = [*pinned["context"], *RESULT]
    fresh = ask(agent, turn, "fresh", is_last_step=True)
    assert fresh["cached_tokens"] == 0
    seconds = [ask(agent, turn, p, is_last_step=True) for p in ("below", "pinned")]
    for second in seconds:
        assert second["cached_tokens"] == 0
        assert second["token_ids"] == fresh["token_ids"]
    # These are other weights, or all of this says nothing.
    assert ask(agent, PROMPT, "other")["token_ids"] != pinned["token_ids"]
    assert agent.pins("reset") == ended + 1
