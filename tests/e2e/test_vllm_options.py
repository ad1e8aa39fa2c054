"""vLLM's own options beside TTLConnector, on real servers."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from bench.process import ServerError
from tests.e2e.conftest import HANG_S, Agent, start_server

pytestmark = pytest.mark.e2e

PROMPT = [5 + (i * 7919 + i * i) % 2000 for i in range(200)]
RESULT = [5 + (i * 104_729) % 2000 for i in range(40)]
HOLD = {
    "policy": "fixed",
    "policy_options": {"ttl_s": 300.0},
    "max_pinned_fraction": 1.0,
}


def why_not(tiny_model, tmp_path, *arguments: str, **environ: str) -> str:
    """The last words of a server that does not start."""
    options: dict[str, Any] = {"extra_args": arguments, "extra_env": environ}
    with (
        pytest.raises(ServerError) as caught,
        start_server(tiny_model, tmp_path / "log", {}, **options),
    ):
        pass
    assert "exit status 1" in str(caught.value)
    return str(caught.value)


def test_vllms_offloading_stops_the_server_with_one_sentence(tiny_model, tmp_path):
    words = why_not(tiny_model, tmp_path, "--kv-offloading-size", "1")
    (sentence,) = [line for line in words.splitlines() if "ConfigError" in line]
    for part in ("--kv-offloading-size", "--kv-transfer-config", '"lower_tier"'):
        assert part in sentence


def test_a_server_that_does_not_load_our_plugin_does_not_start(tiny_model, tmp_path):
    words = why_not(tiny_model, tmp_path, VLLM_PLUGINS="lora_filesystem_resolver")
    assert "TTLConnector" in words


def test_options_that_change_what_we_build_on(tiny_model, tmp_path):
    """Another hash, drafts, events on the wire, no stats: still the same tokens."""
    common = (
        *("--prefix-caching-hash-algo", "sha256_cbor"),
        *("--speculative-config", json.dumps({"method": "ngram"} | DRAFTS)),
        *("--kv-events-config", json.dumps({"enable_kv_cache_events": True} | NULL)),
        *("--scheduling-policy", "priority", "--disable-log-stats"),
    )
    answers = []
    for extra in (None, HOLD):
        log = tmp_path / f"{extra is None}.log"
        with start_server(tiny_model, log, extra, extra_args=common) as server:
            agent = Agent(server)
            first = agent.ask(PROMPT, max_tokens=24)
            second = agent.ask([*first["context"], *RESULT], max_tokens=24)
            answers.append([turn["token_ids"] for turn in (first, second)])
            if extra is not None:
                assert second["cached_tokens"] == 223 // 32 * 32
                programs = httpx.get(f"{server.base_url}/ttlcache/programs")
                (engine,) = programs.raise_for_status().json()["engines"]
                assert len(engine["programs"]) == 1
                assert not [
                    n for n, _ in server.metrics() if n.startswith("ttlcache_pin")
                ]
                told = [
                    line
                    for line in log.read_text().splitlines()
                    if "ttlcache: " in line
                ]
                assert (
                    len([line for line in told if "--disable-log-stats" in line]) == 1
                )
            assert server.errors_in_log() == []
    assert answers[0] == answers[1]


DRAFTS = {"num_speculative_tokens": 2, "prompt_lookup_max": 4}
NULL = {"publisher": "null"}


def test_a_model_for_embeddings_is_served_and_nothing_is_pinned(tiny_model, tmp_path):
    body = {"model": "tiny", "input": PROMPT}
    answers = []
    for extra in (None, HOLD):
        log = tmp_path / f"{extra is None}.log"
        convert = ("--runner", "pooling", "--convert", "embed")
        with start_server(tiny_model, log, extra, extra_args=convert) as server:
            url = f"{server.base_url}/v1/embeddings"
            for _ in range(2):
                answer = httpx.post(url, json=body, timeout=HANG_S).raise_for_status()
            answers.append(answer.json()["data"][0]["embedding"])
            if extra is not None:
                agent = Agent(server)
                assert agent.count("ttlcache_pins_started_total") == 0
                assert agent.count("ttlcache_hook_errors_total") == 0
                assert "none is pinned" in log.read_text()
            assert server.errors_in_log() == []
    assert answers[0] == pytest.approx(answers[1], abs=1e-5)
