"""What a user of a real vLLM server sees. Blocks hold 32 tokens."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.e2e.conftest import HANG_S, Agent
from tests.e2e.loads import completion

pytestmark = pytest.mark.e2e


def prompt(seed: int, length: int) -> list[int]:
    return [5 + (seed * 7919 + i * i * 31 + i) % 2000 for i in range(length)]


def test_one_line_at_start_says_what_runs(agent):
    log = agent.server.log_path.read_text()
    lines = [line for line in log.splitlines() if "ordering=ttl-aware" in line]
    assert len(lines) == 1
    for part in ("policy=fixed", "max_pinned_fraction=1", "scheduler=", "vLLM 0."):
        assert part in lines[0]


def test_claim(agent):
    before = agent.pins("claimed")
    claimed = agent.count("ttlcache_claimed_tokens_total")
    saved = agent.count("ttlcache_prefill_tokens_saved_total")
    hints = {"program_id": "claim", "tool": "bash", "ttl": 300}
    first = agent.ask(prompt(1, 200), hints=hints)
    assert agent.count("ttlcache_pins_active") >= 1
    assert agent.count("vllm:kv_cache_usage_perc") == pytest.approx(0.0, abs=1e-6)
    second = agent.ask(
        first["context"] + prompt(2, 40),
        hints={"program_id": "claim", "is_last_step": True},
    )
    assert second["cached_tokens"] == 207 // 32 * 32
    assert agent.pins("claimed") == before + 1
    assert agent.count("ttlcache_claimed_tokens_total") >= claimed + 192
    # Nobody wanted the memory: plain vLLM's prefix cache would have had it, too.
    assert agent.count("ttlcache_prefill_tokens_saved_total") == saved


def tenants_share_nothing(agent: Agent, tokens: list[int]) -> None:
    """One id and one prompt of whole blocks under three salts."""
    hints = {"program_id": "same", "ttl": "5m"}

    def ask(tokens: list[int], tenant: str) -> dict[str, Any]:
        return agent.ask(tokens, hints=hints, cache_salt=tenant)

    agent.http.post("/reset_prefix_cache").raise_for_status()
    firsts = {tenant: ask(tokens, tenant) for tenant in ("a", "b")}
    assert [first["cached_tokens"] for first in firsts.values()] == [0, 0]
    assert agent.count("ttlcache_pins_active") == 2
    claimed = agent.pins("claimed")
    longer = [*firsts["a"]["context"], 7, 8, 9]
    thief = ask(longer, "c")
    assert (thief["cached_tokens"], agent.pins("claimed")) == (0, claimed)
    owner = ask(longer, "a")
    assert owner["cached_tokens"] == len(tokens)
    assert agent.pins("claimed") == claimed + 1
    assert owner["token_ids"] == thief["token_ids"]
    agent.http.post("/reset_prefix_cache").raise_for_status()


def test_tenants_with_one_id_and_one_prompt_share_nothing(agent):
    tenants_share_nothing(agent, prompt(55, 320))


def test_client_that_goes_away_mid_turn_leaves_nothing(agent):
    hints, most = {"program_id": "abort", "ttl": 300}, 3000
    body = completion(prompt(60, 400), hints, most) | {"stream": True}
    url = f"{agent.server.base_url}/v1/completions"
    agent.http.post("/reset_prefix_cache").raise_for_status()
    for _ in range(10):
        generated = agent.count("vllm:generation_tokens_total")
        with httpx.stream("POST", url, json=body, timeout=HANG_S) as response:
            next(response.iter_lines())
        assert agent.reaches(lambda: agent.count("vllm:num_requests_running") == 0)
        generated = agent.count("vllm:generation_tokens_total") - generated
        if generated < most:
            break
        # This process slept so long that the turn was over: not what is asked here.
        agent.http.post("/reset_prefix_cache").raise_for_status()
    else:
        pytest.fail("no turn was still under way when its client left")
    assert agent.count("ttlcache_pinned_blocks") == 0


def test_reading_the_tool_from_the_output_costs_little(agent):
    """Random weights write no tool call, but every turn without a hint is read."""
    agent.ask(prompt(90, 40), max_tokens=64)
    deciding_s = agent.count("ttlcache_decide_seconds_sum")
    serving_s = agent.count("vllm:request_inference_time_seconds_sum")
    assert agent.count("ttlcache_decide_seconds_count") > 0
    assert deciding_s < 0.05 * serving_s
