"""What policy `observe` predicts is what `adaptive` spares, on a load of two kinds."""

import pytest

from bench.sim.rivals.arms import parse_arms
from bench.sim.settings import EngineSetting
from ttlcache_sim.cell import run_cell
from ttlcache_sim.load.workload import WorkloadSpec
from ttlcache_sim.settings import Cell

ARMS = 'vllm,adaptive,adaptive:{"policy":"observe"}'


@pytest.mark.parametrize(
    ("workload", "blocks", "programs", "rate"),
    [
        ("swe", 1_000, 12, 1.0),
        pytest.param("bfcl", 4_000, 24, 0.02, marks=pytest.mark.nightly),
    ],
)
def test_savable_tokens_are_those_that_adaptive_does_not_prefill(
    workload, blocks, programs, rate
):
    engine = EngineSetting(blocks=blocks, max_num_batched_tokens=1024)
    context = engine.max_context // 2
    load = WorkloadSpec(workload, programs, rate, seed=1, max_context=context)
    cells = [run_cell(Cell(arm, engine, load)).metrics for arm in parse_arms(ARMS)]
    vllm, adaptive, observe = cells
    spared = adaptive["cached_tokens"] - vllm["cached_tokens"]
    savable = observe["connector"]["prefill_tokens_savable"]
    assert savable == pytest.approx(spared, rel=0.1)
    assert observe["mean_jct_s"] == vllm["mean_jct_s"], "it changes nothing"
    assert observe["cached_tokens"] == vllm["cached_tokens"]
