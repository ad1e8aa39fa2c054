"""A vLLM server with the CPU tier in the box: the tokens of a run without any cache.

Models of several shapes of KV cache: full attention, a sliding window beside it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from bench.serve.server import ServerOptions, VLLMServer, by_label
from bench.serve.tiny_model import build
from tests.e2e.conftest import DEV_MODE, Agent, start_server
from tests.e2e.loads import KEPT, PROGRAMS, first_prompt, tool_result
from tests.e2e.models import window_model

pytestmark = pytest.mark.e2e

EXTRA = {
    "policy": "fixed",
    "policy_options": {"ttl_s": 300.0},
    "max_pinned_fraction": 1.0,
    "lower_tier": "cpu",
    "cpu_gb": 0.25,
}


@contextlib.contextmanager
def serving(model: Path, log: Path, num_blocks: int, **extra: Any) -> Iterator[Agent]:
    """Checked at the end: no error, and no block is referenced by what has ended."""
    options = {"num_blocks": num_blocks, "max_model_len": 1024}
    with start_server(model, log, EXTRA | extra, **options) as server:
        agent = Agent(server)
        yield agent
        agent.empty_gpu()
        agent.settle()
        assert agent.count("ttlcache_hook_errors_total") == 0
        assert agent.count("ttlcache_free_blocks") == num_blocks - 1
        assert server.errors_in_log() == []


def first(agent: Agent, index: int, name: str) -> dict[str, Any]:
    hints = {"program_id": f"{name}-{index}", "tool": "bash"}
    return agent.ask(first_prompt(index), hints=hints, cache_salt=name)


def second(
    agent: Agent, answer: dict[str, Any], index: int, name: str
) -> dict[str, Any]:
    hints = {"program_id": f"{name}-{index}", "is_last_step": True}
    prompt = answer["context"] + tool_result(index)
    return agent.ask(prompt, hints=hints, cache_salt=name)


def test_outputs_are_those_of_a_run_without_any_cache(tiny_model, tmp_path, vanilla):
    """A pool that holds a fifth of fifty programs; the tier holds the others."""
    expected = vanilla["uncached"]
    with serving(tiny_model, tmp_path / "vllm.log", 90) as agent:
        everybody = range(PROGRAMS)
        with ThreadPoolExecutor(8) as pool:
            firsts = list(pool.map(lambda i: first(agent, i, "same"), everybody))
            answers = list(
                pool.map(lambda i: second(agent, firsts[i], i, "same"), everybody)
            )
        for index in everybody:
            assert firsts[index]["token_ids"] == expected[index][0]
            assert answers[index]["token_ids"] == expected[index][1]
        assert sum(a["cached_tokens"] == KEPT for a in answers) >= 0.9 * PROGRAMS
        reloads = by_label(agent.server.metrics(), "ttlcache_reloads_total", "tier")
        assert reloads["cpu"] >= 0.5 * PROGRAMS


def test_a_sliding_window_beside_full_attention(tiny_model, tmp_path):
    """Two KV cache groups: turns go down and come back, window and all."""
    model = window_model(tmp_path / "model", tiny_model)
    with serving(model, tmp_path / "vllm.log", 100) as agent:
        some = range(20)
        with ThreadPoolExecutor(4) as pool:
            firsts = list(pool.map(lambda i: first(agent, i, "same"), some))
            answers = list(
                pool.map(lambda i: second(agent, firsts[i], i, "same"), some)
            )
            fresh = list(
                pool.map(lambda i: second(agent, firsts[i], i, f"new-{i}"), some)
            )
        assert all(answer["cached_tokens"] == 0 for answer in fresh)
        assert [a["token_ids"] for a in answers] == [a["token_ids"] for a in fresh]
        assert sum(a["cached_tokens"] >= 160 for a in answers) >= 15
        reloads = by_label(agent.server.metrics(), "ttlcache_reloads_total", "tier")
        assert reloads["cpu"] >= 8


def goes_down(agent: Agent, index: int, name: str) -> dict[str, Any]:
    """A program's first turn, once the tier has it."""
    before = agent.count("ttlcache_demotions_total", "outcome", "stored")
    answer = first(agent, index, name)
    assert agent.reaches(
        lambda: agent.count("ttlcache_demotions_total", "outcome", "stored") > before
    )
    return answer


def post(agent: Agent, path: str, **body: Any) -> dict[str, Any]:
    answer = agent.http.post(path, json=body or None).raise_for_status()
    return dict(answer.json()) if answer.content else {}


@pytest.mark.nightly
def test_resets_and_new_weights_beside_another_connector(tiny_model, tmp_path):
    """A reset succeeds whenever no request runs, whatever is being copied."""
    extra = EXTRA | {"policy_options": {"ttl_s": 0.05}, "demote": "on-expiry"}
    ours = {"kv_connector": "TTLConnector", "kv_connector_extra_config": extra}
    other = {"kv_connector": "IdleConnector"}
    other["kv_connector_module_path"] = "bench.sim.idle_connector"
    children = [child | {"kv_role": "kv_both"} for child in (ours, other)]
    options = ServerOptions(
        num_blocks=90,
        max_model_len=1024,
        kv_transfer_config={
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"connectors": children},
        },
        extra_env=DEV_MODE,
    )
    with VLLMServer(tiny_model, options, tmp_path / "vllm.log") as server:
        agent = Agent(server)
        answer = goes_down(agent, 1, "back")
        assert post(agent, "/reset_prefix_cache")["success"]
        assert second(agent, answer, 1, "back")["cached_tokens"] == KEPT
        for index in range(10):
            first(agent, index, f"store-{index}")
            time.sleep(0.05 + index / 1000)
            assert post(agent, "/reset_prefix_cache")["success"], index
        resets = ("/reset_prefix_cache?reset_external=true", "/sleep?level=1")
        for number, reset in enumerate(resets):
            answer = goes_down(agent, 2, f"reset-{number}")
            post(agent, reset)
            if "sleep" in reset:
                post(agent, "/wake_up")
            assert agent.reaches(lambda: not agent.count("ttlcache_tier_used_bytes"))
            answer = second(agent, answer, 2, f"reset-{number}")
            assert answer["cached_tokens"] == 0
        answer = goes_down(agent, 3, "weights")
        new = build(tmp_path / "new", seed=1)
        post(agent, "/pause")
        load = {"weights_path": str(new)}
        post(agent, "/collective_rpc", method="reload_weights", kwargs=load)
        post(agent, "/resume")
        turns = [second(agent, answer, 3, name) for name in ("weights", "fresh")]
        assert [turn["cached_tokens"] for turn in turns] == [0, 0]
        assert turns[0]["token_ids"] == turns[1]["token_ids"]
        assert agent.count("ttlcache_hook_errors_total") == 0
        assert server.errors_in_log() == []
