"""A model of full and sliding-window layers, asked to use a real LMCache server.

Nothing of it can be stored while vLLM keeps two KV cache groups: it runs without a
tier and says so. With one group it is like every other model.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.serve.tier_server import TierServer
from tests.e2e.above_tier import AboveTier, serving
from tests.e2e.loads import BLOCK, KEPT
from ttlcache_connector.lmcache_server.launch import TierOptions

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]

WINDOW = 64


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


def cached_after_a_loss(agent: AboveTier) -> int:
    """Tokens of a second turn that came from below; its answer is compared."""
    first = agent.first(7, "hybrid")
    fresh = agent.second(first, 7, "other")
    assert fresh["cached_tokens"] == 0
    agent.empty_gpu()
    second = agent.second(first, 7, "hybrid")
    assert second["token_ids"] == fresh["token_ids"]
    return int(second["cached_tokens"])


def test_a_hybrid_model_has_no_lower_tier_and_says_so(hybrid_model, tiers, tmp_path):
    log = tmp_path / "vllm.log"
    with serving(tiers, hybrid_model, log, 200) as agent:
        told = log.read_text()
        assert told.count("no lower tier for this model") == 1
        assert "nothing of layers of the kind SlidingWindow" in told
        assert agent.count("ttlcache_tier_up") == 0
        assert cached_after_a_loss(agent) == 0
        assert agent.count("ttlcache_tier_bytes_total") == 0


def test_with_one_group_it_has_one(hybrid_model, tiers, tmp_path):
    log = tmp_path / "vllm.log"
    flag = ("--disable-hybrid-kv-cache-manager",)
    with serving(tiers, hybrid_model, log, 200, extra_args=flag) as agent:
        assert "no lower tier" not in log.read_text()
        assert cached_after_a_loss(agent) == KEPT
        moved = agent.count("ttlcache_tier_mover_bytes_total", "mover", "reference")
        assert moved == agent.count("ttlcache_tier_bytes_total") > 0
