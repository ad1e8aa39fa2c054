"""A vLLM server with the CPU tier in the box: the tokens of a run without any cache.

Models of several shapes of KV cache: full attention, sliding windows or states beside.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from bench.serve.tiny_model import build
from tests.e2e.above_tier import AboveTier, serving
from tests.e2e.conftest import HOLD, start_server
from tests.e2e.loads import KEPT, PROGRAMS
from tests.e2e.models import RECURRENT, recurrent_model, window_model

pytestmark = pytest.mark.e2e

CPU = {"lower_tier": "cpu", "cpu_gb": 0.25}


def test_outputs_are_those_of_a_run_without_any_cache(tiny_model, tmp_path, vanilla):
    """A pool that holds a fifth of fifty programs; the tier holds the others."""
    expected = vanilla["uncached"]
    with serving(tiny_model, tmp_path / "vllm.log", 90, CPU) as agent:
        everybody = range(PROGRAMS)
        with ThreadPoolExecutor(8) as pool:
            firsts = list(pool.map(lambda i: agent.first(i, "same"), everybody))
            answers = list(
                pool.map(lambda i: agent.second(firsts[i], i, "same"), everybody)
            )
        for index in everybody:
            assert firsts[index]["token_ids"] == expected[index][0]
            assert answers[index]["token_ids"] == expected[index][1]
        assert sum(a["cached_tokens"] == KEPT for a in answers) >= 0.9 * PROGRAMS
        assert agent.reloads() >= 0.5 * PROGRAMS


RANKS = ("--tensor-parallel-size", "2", "--distributed-executor-backend", "mp")


@pytest.mark.parametrize(
    ("shape", "blocks", "flags"),
    [
        (window_model, 100, ()),
        (recurrent_model, 70, RECURRENT),
        pytest.param(None, 70, RANKS, marks=pytest.mark.nightly),
    ],
    ids=["a sliding window", "recurrent states", "tensor parallel ranks"],
)
def test_turns_go_down_and_come_back(tiny_model, tmp_path, shape, blocks, flags):
    """Of several KV cache groups, window, states and all; of ranks, each its share."""
    model = tiny_model if shape is None else shape(tmp_path / "model", tiny_model)
    log = tmp_path / "vllm.log"
    with serving(model, log, blocks, CPU, extra_args=flags) as agent:
        some = range(20)
        with ThreadPoolExecutor(4) as pool:
            firsts = list(pool.map(lambda i: agent.first(i, "same"), some))
            answers = list(pool.map(lambda i: agent.second(firsts[i], i, "same"), some))
            fresh = list(
                pool.map(lambda i: agent.second(firsts[i], i, f"new-{i}"), some)
            )
        assert all(answer["cached_tokens"] == 0 for answer in fresh)
        assert [a["token_ids"] for a in answers] == [a["token_ids"] for a in fresh]
        assert sum(a["cached_tokens"] >= 160 for a in answers) >= 15
        assert agent.reloads() >= 8


def goes_down(agent: AboveTier, index: int, name: str) -> dict[str, Any]:
    """A program's first turn, once the tier has it."""
    before = agent.count("ttlcache_demotions_total", "outcome", "stored")
    answer = agent.first(index, name)
    assert agent.reaches(
        lambda: agent.count("ttlcache_demotions_total", "outcome", "stored") > before
    )
    return answer


@pytest.mark.nightly
def test_resets_and_new_weights_beside_another_connector(tiny_model, tmp_path):
    """A reset succeeds whenever no request runs, whatever is being copied."""
    extra = HOLD | CPU | {"policy_options": {"ttl_s": 0.05}, "demote": "on-expiry"}
    ours = {"kv_connector": "TTLConnector", "kv_connector_extra_config": extra}
    other = {"kv_connector": "IdleConnector"}
    other["kv_connector_module_path"] = "ttlcache_sim.idle_connector"
    children = [child | {"kv_role": "kv_both"} for child in (ours, other)]
    with start_server(
        tiny_model,
        tmp_path / "vllm.log",
        {"connectors": children},
        connector="MultiConnector",
        num_blocks=90,
        max_model_len=1024,
    ) as server:
        agent = AboveTier(server, None)
        answer = goes_down(agent, 1, "back")
        assert agent.post("/reset_prefix_cache")["success"]
        assert agent.second(answer, 1, "back")["cached_tokens"] == 0
        for index in range(10):
            agent.first(index, f"store-{index}")
            time.sleep(0.05 + index / 1000)
            assert agent.post("/reset_prefix_cache")["success"], index
        resets = ("/reset_prefix_cache", "/sleep?level=1")
        for number, reset in enumerate(resets):
            answer = goes_down(agent, 2, f"reset-{number}")
            agent.post(reset)
            if "sleep" in reset:
                agent.post("/wake_up")
            assert agent.reaches(lambda: not agent.count("ttlcache_tier_used_bytes"))
            answer = agent.second(answer, 2, f"reset-{number}")
            assert answer["cached_tokens"] == 0
        answer = goes_down(agent, 3, "weights")
        agent.load_weights(build(tmp_path / "new", seed=1))
        turns = [agent.second(answer, 3, name) for name in ("weights", "fresh")]
        assert [turn["cached_tokens"] for turn in turns] == [0, 0]
        assert turns[0]["token_ids"] == turns[1]["token_ids"]
        assert agent.count("ttlcache_hook_errors_total") == 0
        assert server.errors_in_log() == []
