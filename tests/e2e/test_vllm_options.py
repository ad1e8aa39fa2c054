"""vLLM's own options beside TTLConnector, on real servers."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest
import vllm

from bench.serve.process import ServerError
from tests.e2e.conftest import HANG_S, HOLD, Agent, Serve, start_server
from tests.e2e.loads import PROMPT, RESULT, completion, two_turns
from ttlcache.analysis.reader import load

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]


@pytest.mark.parametrize(
    ("extra", "options", "parts"),
    [
        pytest.param(
            {},
            {"extra_args": ("--kv-offloading-size", "1")},
            ("--kv-offloading-size", "--kv-transfer-config", '"lower_tier"'),
            id="vLLM's own offloading",
        ),
        pytest.param(
            {"polcy": "x"}, {}, ("'polcy'", "did you mean 'policy'"), id="a wrong key"
        ),
        pytest.param(
            {},
            {"extra_env": {"VLLM_PLUGINS": "lora_filesystem_resolver"}},
            ("TTLConnector",),
            id="our plugin is not loaded",
        ),
    ],
)
def test_a_server_that_does_not_start_says_why(
    tiny_model, tmp_path, extra, options, parts
):
    log = tmp_path / "log"
    with (
        pytest.raises(ServerError) as caught,
        start_server(tiny_model, log, extra, **options),
    ):
        pass
    assert "exit status 1" in str(caught.value)
    for part in parts:
        assert part in str(caught.value)
    # Without our plugin it is vLLM that refuses, in its own way.
    is_ours = "extra_env" not in options
    assert ("Traceback" in log.read_text()) != is_ours


def test_options_that_change_what_we_build_on(tiny_model, tmp_path, vanilla):
    """Another hash, drafts, events on the wire, no stats: still the same tokens."""
    options = (
        *("--prefix-caching-hash-algo", "sha256_cbor"),
        *("--speculative-config", json.dumps({"method": "ngram"} | DRAFTS)),
        *("--kv-events-config", json.dumps({"enable_kv_cache_events": True} | NULL)),
        *("--scheduling-policy", "priority"),
        *("--disable-log-stats", "--no-enable-per-request-metrics"),
    )
    log = tmp_path / "log"
    with start_server(tiny_model, log, HOLD, extra_args=options) as server:
        turns = two_turns(Agent(server))
        assert [turn["token_ids"] for turn in turns] == vanilla["two_turns"]
        assert turns[1]["cached_tokens"] == 223 // 32 * 32
        programs = httpx.get(f"{server.base_url}/ttlcache/programs")
        (engine,) = programs.raise_for_status().json()["engines"]
        assert len(engine["programs"]) == 1
        assert not [n for n, _ in server.metrics() if n.startswith("ttlcache_pin")]
        told = [line for line in log.read_text().splitlines() if "ttlcache: " in line]
        assert len([line for line in told if "--disable-log-stats" in line]) == 1
        assert server.errors_in_log() == []


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


#: Not in builds for CPUs; `make test-ahead` has it.
RUST = Path(vllm.__file__).with_name("vllm-rs")


@pytest.mark.skipif(not RUST.exists(), reason="this build has no Rust API server")
def test_what_the_rust_api_server_lacks_is_said_and_no_more(tiny_model, tmp_path):
    folder, log = tmp_path / "recording", tmp_path / "log"
    extra = HOLD | {"record_path": str(folder)}
    env = {"VLLM_USE_RUST_FRONTEND": "1"}
    with start_server(tiny_model, log, extra, kind=Serve, extra_env=env) as server:

        def ask(prompt: list[int], hints: object = None) -> list[int]:
            url = f"{server.base_url}/v1/completions"
            answer = httpx.post(url, json=completion(prompt, hints), timeout=HANG_S)
            (choice,) = answer.raise_for_status().json()["choices"]
            return [*prompt, *choice["token_ids"]]

        ask(PROMPT, {"program_id": "job-17", "tool": "bash"})
        context = ask(RESULT * 5)
        ask([*context, *RESULT])
        page = httpx.get(f"{server.base_url}/metrics", timeout=HANG_S).text
        assert "vllm:prefix_cache_hits_total" in page
        assert "ttlcache_" not in page
        url = f"{server.base_url}/ttlcache/programs"
        assert httpx.get(url, timeout=HANG_S).status_code == 404
        (told,) = [s for s in log.read_text().splitlines() if "Rust API server" in s]
        for part in ("/ttlcache/", "ttlcache_* metrics", "own headers"):
            assert part in told
    recording = load(folder)
    hinted = recording.find("job-17")
    assert hinted is not None
    assert hinted.turns[0].rule == "hint"
    assert [turn.rule for _, turn in recording.turns()] == ["hint", "new", "prefix"]
