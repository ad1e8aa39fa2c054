"""A model of full and sliding-window layers, asked to use a real LMCache server.

Nothing of it can be stored while vLLM keeps two KV cache groups: it runs without a
tier and says so. With one group it is like every other model.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bench.serve.server import total
from bench.serve.tier_server import TierServer
from tests.e2e.conftest import Agent, start_server
from ttlcache_connector.lmcache_server.launch import TierOptions

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]

BLOCK, WINDOW = 32, 64
PROMPT = [5 + (i * i * 31 + i * 3) % 2000 for i in range(200)]
MORE = [5 + i * 17 % 2000 for i in range(40)]


@pytest.fixture(scope="module")
def hybrid_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gemma 2's layers with seeded random weights, the tiny model's tokenizer."""
    import torch
    from transformers import Gemma2Config, Gemma2ForCausalLM

    path = tmp_path_factory.mktemp("hybrid")
    config = Gemma2Config(
        vocab_size=2048,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        sliding_window=WINDOW,
        query_pre_attn_scalar=32,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        initializer_range=0.2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(3)
        Gemma2ForCausalLM(config).to(torch.float32).save_pretrained(path)
    for file in tiny_model.glob("*token*"):
        shutil.copy(file, path)
    return path


@pytest.fixture(scope="module")
def tiers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TierServer]:
    options = TierOptions(cpu_gb=0.25, chunk_tokens=BLOCK)
    log = tmp_path_factory.mktemp("tiers") / "lmcache.log"
    with TierServer(options, log) as server:
        yield server


@contextlib.contextmanager
def serving(
    model: Path, tiers: TierServer, log: Path, *args: str
) -> Iterator[tuple[Agent, str]]:
    """A client of a server, and what the server has logged by now."""
    extra = {
        "policy": "fixed",
        "policy_options": {"ttl_s": 0.5},
        "max_pinned_fraction": 1.0,
        "debug_invariants": True,
        "demote": "on-expiry",  # nobody needs the memory: nothing would go down
        **tiers.options.connector_config(),
        "lmcache.mp.mq_timeout": 60.0,  # a busy machine is no outage
    }
    with start_server(model, log, extra, num_blocks=200, extra_args=args) as server:
        agent = Agent(server)
        yield agent, log.read_text()
        agent.empty_gpu()
        agent.settle()
        assert agent.count("ttlcache_hook_errors_total") == 0
        assert agent.count("ttlcache_free_blocks") == 199
        assert server.errors_in_log() == []


def two_turns(agent: Agent, lose: Callable[[], None]) -> int:
    """Tokens of the second turn that came from anywhere; its answer is compared."""
    first = agent.ask(PROMPT, cache_salt="none")
    fresh = agent.ask([*first["context"], *MORE], cache_salt="other")
    assert fresh["cached_tokens"] == 0
    hints = {"program_id": "hybrid", "tool": "bash"}
    again = agent.ask(PROMPT, hints=hints)
    assert again["token_ids"] == first["token_ids"]
    lose()
    empty_gpu(agent)
    second = agent.ask([*again["context"], *MORE], hints=hints | {"is_last_step": True})
    assert second["token_ids"] == fresh["token_ids"]
    return int(second["cached_tokens"])


def test_a_hybrid_model_has_no_lower_tier_and_says_so(hybrid_model, tiers, tmp_path):
    log = tmp_path / "vllm.log"
    with serving(hybrid_model, tiers, log) as (agent, told):
        assert told.count("no lower tier for this model") == 1
        assert "nothing of layers of the kind SlidingWindow" in told
        assert agent.count("ttlcache_tier_up") == 0
        assert two_turns(agent, lambda: None) == 0
        assert agent.count("ttlcache_tier_bytes_total") == 0


def test_with_one_group_it_has_one(hybrid_model, tiers, tmp_path):
    flag = "--disable-hybrid-kv-cache-manager"
    with serving(hybrid_model, tiers, tmp_path / "vllm.log", flag) as (agent, told):
        assert "no lower tier" not in told
        cached = two_turns(agent, lambda: below(agent))
        assert cached == (len(PROMPT) + 8 - 1) // BLOCK * BLOCK
        moved = agent.count("ttlcache_tier_mover_bytes_total", "mover", "reference")
        assert moved == agent.count("ttlcache_tier_bytes_total") > 0


def empty_gpu(agent: Agent) -> None:
    """Refused while a copy under way holds blocks."""
    deadline = time.monotonic() + 120.0
    while time.monotonic() < deadline:
        if agent.http.post("/reset_prefix_cache").json()["success"]:
            return
        agent.settle()
    raise AssertionError("blocks are held for ever")


def below(agent: Agent) -> None:
    """The pin has expired and was copied; an idle engine does not step."""
    deadline = time.monotonic() + 120.0
    while time.monotonic() < deadline:
        agent.settle()
        samples = agent.server.metrics()
        stored = agent.count("ttlcache_demotions_total", "outcome", "stored")
        if stored and not total(samples, "ttlcache_pins_active"):
            return
        time.sleep(0.1)
    raise AssertionError("the pin did not go below")
