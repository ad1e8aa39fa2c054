"""What a user of a real vLLM server sees. Blocks hold 32 tokens."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.e2e.conftest import HANG_S, POOL_BLOCKS

pytestmark = pytest.mark.e2e


def prompt(seed: int, length: int) -> list[int]:
    return [5 + (seed * 7919 + i * i * 31 + i) % 2000 for i in range(length)]


def wait_for(condition, agent) -> bool:
    """Poke the engine until `condition` holds: an idle engine does not step."""
    deadline = time.monotonic() + HANG_S
    while time.monotonic() < deadline:
        if condition():
            return True
        agent.settle()
        time.sleep(0.1)
    return False


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
    second = agent.ask(
        first["context"] + prompt(2, 40),
        hints={"program_id": "claim", "is_last_step": True},
    )
    assert second["cached_tokens"] == 207 // 32 * 32
    assert agent.pins("claimed") == before + 1
    assert agent.count("ttlcache_claimed_tokens_total") >= claimed + 192
    # Nobody wanted the memory: plain vLLM's prefix cache would have had it, too.
    assert agent.count("ttlcache_prefill_tokens_saved_total") == saved


def test_expiry(agent):
    # Nobody else's pins may expire meanwhile, and the wish starts after this.
    agent.http.post("/reset_prefix_cache").raise_for_status()
    before, asked_s = agent.pins("expired"), time.monotonic()
    agent.ask(prompt(3, 200), hints={"program_id": "expiry", "ttl": "2s"})
    assert agent.count("ttlcache_pins_started_total") > 0
    assert wait_for(lambda: agent.pins("expired") == before + 1, agent)
    assert time.monotonic() - asked_s >= 2.0
    agent.ask([9], max_tokens=1, hints={"program_id": "expiry", "is_last_step": True})


def test_last_step_keeps_nothing(agent):
    started = agent.count("ttlcache_pins_started_total")
    agent.ask(prompt(4, 200), hints={"program_id": "last", "is_last_step": True})
    assert agent.count("ttlcache_pins_started_total") == started


def test_victims_give_way_to_a_request_that_needs_the_pool(agent):
    before = agent.pins("victim")
    for index in range(4):
        agent.ask(
            prompt(10 + index, 800),
            hints={"program_id": f"victim-{index}", "ttl": "300s"},
        )
    big = agent.ask(prompt(20, 3400), hints={"is_last_step": True})
    assert len(big["token_ids"]) == 8
    assert agent.pins("victim") > before
    for index in range(4):
        hints = {"program_id": f"victim-{index}", "is_last_step": True}
        agent.ask([9], max_tokens=1, hints=hints)


def test_prefix_inference_without_any_id(agent):
    claimed = agent.pins("claimed")
    by_prefix = agent.count("ttlcache_turns_identified_total", "rule", "prefix")
    first = agent.ask(prompt(30, 200))
    second = agent.ask(first["context"] + prompt(31, 40))
    assert second["cached_tokens"] == 207 // 32 * 32
    assert agent.pins("claimed") == claimed + 1
    after = agent.count("ttlcache_turns_identified_total", "rule", "prefix")
    assert after == by_prefix + 1


def test_session_header_identifies_the_program(agent):
    before = agent.count("ttlcache_turns_identified_total", "rule", "session")
    session = {"X-Session-ID": "session-1"}
    first = agent.ask(prompt(40, 200), headers=session)
    agent.ask(first["context"] + prompt(41, 40), headers=session)
    after = agent.count("ttlcache_turns_identified_total", "rule", "session")
    assert after == before + 2


def test_two_programs_share_a_prefix(agent):
    shared = prompt(50, 320)  # 10 blocks
    agent.http.post("/reset_prefix_cache").raise_for_status()
    contexts = {}
    for name in ("a", "b"):
        choice = agent.ask(
            [*shared, *prompt(51 + ord(name), 64)],
            hints={"program_id": f"share-{name}", "ttl": 300},
        )
        contexts[name] = choice["context"]
    # 391 tokens have KV: 12 full blocks each, 10 of them common.
    assert agent.count("ttlcache_pinned_blocks") == 14
    for name, context in contexts.items():
        done = agent.ask(
            context + prompt(52, 10),
            hints={"program_id": f"share-{name}", "is_last_step": True},
        )
        assert done["cached_tokens"] == 12 * 32
    assert agent.count("ttlcache_pinned_blocks") == 0


def test_a_turn_that_ends_on_a_stop_string_is_kept(agent):
    text = agent.ask(prompt(35, 200), max_tokens=24)["text"]
    stop = text[len(text) // 2 :][:4]
    claimed = agent.pins("claimed")
    first = agent.ask(
        prompt(35, 200),
        max_tokens=24,
        min_tokens=1,
        stop=[stop],
        hints={"program_id": "stops", "ttl": 300},
    )
    assert (first["finish_reason"], first["stop_reason"]) == ("stop", stop)
    agent.ask(
        first["context"] + prompt(36, 40),
        hints={"program_id": "stops", "is_last_step": True},
    )
    assert agent.pins("claimed") == claimed + 1


def test_client_that_goes_away_mid_turn_leaves_nothing(agent):
    body = {
        "model": "tiny",
        "prompt": prompt(60, 400),
        "max_tokens": 3000,
        "ignore_eos": True,
        "stream": True,
        "kv_transfer_params": {"ttlcache": {"program_id": "abort", "ttl": 300}},
    }
    url = f"{agent.server.base_url}/v1/completions"
    agent.http.post("/reset_prefix_cache").raise_for_status()
    for _ in range(10):
        generated = agent.count("vllm:generation_tokens_total")
        with httpx.stream("POST", url, json=body, timeout=HANG_S) as response:
            next(response.iter_lines())
        assert wait_for(lambda: agent.count("vllm:num_requests_running") == 0, agent)
        generated = agent.count("vllm:generation_tokens_total") - generated
        if generated < body["max_tokens"]:
            break
        # This process slept so long that the turn was over: not what is asked here.
        agent.http.post("/reset_prefix_cache").raise_for_status()
    else:
        pytest.fail("no turn was still under way when its client left")
    assert agent.count("ttlcache_pinned_blocks") == 0


def test_reset_prefix_cache_with_live_pins(agent):
    before = agent.pins("reset")
    agent.ask(prompt(70, 200), hints={"program_id": "reset", "ttl": 300})
    agent.http.post("/reset_prefix_cache").raise_for_status()
    again = agent.ask(
        prompt(70, 200), hints={"program_id": "reset", "is_last_step": True}
    )
    assert again["cached_tokens"] == 0
    assert agent.pins("reset") == before + 1


JUNK = [
    ("duration", {"ttl": -5}),
    ("duration", {"tool_eta_s": "soon"}),
    ("id_too_long", {"program_id": "x" * 100_000}),
    ("id_type", {"program_id": {"a": [{"b": []}]}}),
    ("id_empty", {"program_id": ""}),
    ("bool_type", {"is_last_step": "maybe"}),
    ("tool_type", {"tool": [1, 2]}),
    ("unknown_key", {"colour": "blue"}),
    ("priority_range", {"priority_class": 10**6}),
    ("not_a_dict", [1, [2, [3]]]),
]


def test_two_hundred_malformed_hints_are_all_served(agent):
    name = "ttlcache_hints_rejected_total"
    before = {reason: agent.count(name, "reason", reason) for reason, _ in JUNK}
    hints = [junk for _, junk in JUNK] * 20

    def ask(junk: object) -> int:
        choice = agent.ask(prompt(80, 40), max_tokens=2, hints=junk)
        return len(choice["token_ids"])

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, hints)) == [2] * 200
    agent.settle()
    for reason, _ in JUNK:
        expected = 20 * sum(reason == r for r, _ in JUNK)
        assert agent.count(name, "reason", reason) == before[reason] + expected


def test_reading_the_tool_from_the_output_costs_little(agent):
    """Random weights write no tool call, but every turn without a hint is read."""
    agent.ask(prompt(90, 40), max_tokens=64)
    deciding_s = agent.count("ttlcache_decide_seconds_sum")
    serving_s = agent.count("vllm:request_inference_time_seconds_sum")
    assert agent.count("ttlcache_decide_seconds_count") > 0
    assert deciding_s < 0.05 * serving_s


def test_every_metric_is_on_vllms_own_endpoint(agent):
    names = {name for name, _ in agent.server.metrics()}
    for expected in (
        "ttlcache_pins_active",
        "ttlcache_pinned_blocks",
        "ttlcache_pins_total",
        "ttlcache_ttl_seconds_bucket",
        "ttlcache_gap_seconds_bucket",
        "ttlcache_claimed_tokens_total",
        "ttlcache_prefill_tokens_saved_total",
        "ttlcache_hook_errors_total",
    ):
        assert expected in names
    assert agent.count("ttlcache_pool_blocks") == POOL_BLOCKS - 1
