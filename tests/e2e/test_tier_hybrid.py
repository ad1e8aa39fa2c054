"""A model of full and sliding-window layers above a real LMCache server.

With one KV cache group it is like every other model; with two it has no tier there
(tests/connector/test_lower_ranks.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.serve.tier_server import TierServer
from tests.e2e.above_tier import AboveTier, serving
from tests.e2e.loads import BLOCK, KEPT
from tests.e2e.models import window_model
from ttlcache_connector.lmcache_server.launch import TierOptions

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]


@pytest.fixture(scope="module")
def hybrid_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return window_model(tmp_path_factory.mktemp("hybrid"), tiny_model)


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


def test_with_one_group_it_has_one(hybrid_model, tiers, tmp_path):
    log = tmp_path / "vllm.log"
    flag = ("--disable-hybrid-kv-cache-manager",)
    with serving(tiers, hybrid_model, log, 200, extra_args=flag) as agent:
        assert "no lower tier" not in log.read_text()
        assert cached_after_a_loss(agent) == KEPT
        moved = agent.count("ttlcache_tier_mover_bytes_total", "mover", "reference")
        assert moved == agent.count("ttlcache_tier_bytes_total") > 0
