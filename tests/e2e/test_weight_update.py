"""vLLM's RL flow on a real server: pause, other weights, resume."""

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


@pytest.fixture
def tiers(tmp_path: Path) -> Iterator[TierServer]:
    options = TierOptions(
        cpu_gb=0.25, disk=tmp_path / "disk", disk_gb=1.0, chunk_tokens=CHUNK
    )
    with TierServer(options, tmp_path / "lmcache.log") as server:
        yield server


@pytest.fixture
def agent(tiers: TierServer, tiny_model: Path, tmp_path: Path) -> Iterator[Agent]:
    extra = {
        "policy": "fixed",
        "policy_options": {"ttl_s": 0.5},
        "max_pinned_fraction": 1.0,
        "debug_invariants": True,
        "demote": "on-expiry",  # nobody needs the memory: nothing would go down
        "lmcache.mp.mq_timeout": 60.0,  # a busy machine is no outage
        **tiers.options.connector_config(),
    }
    log = tmp_path / "vllm.log"
    with start_server(tiny_model, log, extra, num_blocks=POOL_BLOCKS) as server:
        yield Agent(server)
        assert server.errors_in_log() == []


def ask(agent: Agent, prompt: list[int], program: str, **hints: Any) -> dict[str, Any]:
    # Same tokens, different salts: programs share nothing, here and below.
    about = {"program_id": program, "tool": "bash", **hints}
    return agent.ask(prompt, hints=about, cache_salt=program)


def post(agent: Agent, path: str, **body: Any) -> None:
    answer = agent.http.post(path, json=body or None)
    assert answer.status_code == 200, answer.text


def let_go_below(agent: Agent) -> None:
    deadline = time.monotonic() + HANG_S
    while agent.count("ttlcache_demotions_total", "outcome", "stored") < 1:
        assert time.monotonic() < deadline
        agent.settle()


def test_after_a_weight_update_no_kv_of_the_old_weights_is_used(agent, tiers, tmp_path):
    new_weights = build(tmp_path / "new", seed=1)
    below = ask(agent, PROMPT, "below")
    let_go_below(agent)
    assert tiers.clear_cpu()  # on disk
    pinned = ask(agent, PROMPT, "pinned", ttl="300s")
    assert pinned["token_ids"] == below["token_ids"]
    assert agent.count("ttlcache_pins_active") == 1

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
    assert agent.pins("reset") == 1
    assert agent.pins("claimed") == 0
    assert agent.count("ttlcache_reloaded_tokens_total") == 0
    assert agent.count("ttlcache_hook_errors_total") == 0


@pytest.mark.parametrize("reset", ["/reset_prefix_cache?reset_external=true", "/sleep"])
def test_other_ways_to_say_so(agent, reset):
    """The reset that trainers call themselves, and the one that sleep implies."""
    ask(agent, PROMPT, "below")
    let_go_below(agent)  # or nothing could come back from there
    first = ask(agent, PROMPT, "p", ttl="300s")
    post(agent, reset)
    if reset == "/sleep":
        post(agent, "/wake_up")
    assert agent.count("ttlcache_pins_active") == 0
    second = ask(agent, [*first["context"], *RESULT], "p", is_last_step=True)
    assert second["cached_tokens"] == 0
    assert agent.count("ttlcache_reloaded_tokens_total") == 0
    assert agent.pins("reset") == 1
