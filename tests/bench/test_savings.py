"""Tokens told as saved, against what vLLM without us computes more, in virtual time.

With the step times of a real server of this model, from results that are committed.
"""

import json
from pathlib import Path

import pytest

from bench.compare.agents import AgentOptions
from bench.sim.rivals.arms import ARMS
from bench.sim.settings import Cell, EngineSetting
from ttlcache_sim.cell import run_cell
from ttlcache_sim.load.workload import Workload, WorkloadSpec

RESULTS = Path(__file__).parents[2] / "bench/results/validate.json"


@pytest.fixture(scope="module")
def profile(tmp_path_factory):
    path = tmp_path_factory.mktemp("profile") / "profile.json"
    path.write_text(json.dumps(json.loads(RESULTS.read_text())["profile"]))
    return path


def told_and_measured(profile, **load):
    """Saved tokens of one load; `load`: what differs from the demo's."""
    options = AgentOptions(**load)
    server = options.server(None)
    engine = EngineSetting(
        blocks=server.num_blocks,
        block_size=server.block_size,
        max_num_seqs=server.max_num_seqs,
        max_num_batched_tokens=server.max_num_batched_tokens,
        profile=profile,
    )
    workload = Workload(options.workload())
    spec = WorkloadSpec("as given", options.programs, options.rate, options.seed)
    plain, ours = (
        run_cell(Cell(ARMS[arm], engine, spec), workload).metrics
        for arm in ("vllm", "adaptive")
    )
    told = ours["connector"].get("prefill_tokens_saved", 0)
    return told, ours["cached_tokens"] - plain["cached_tokens"]


@pytest.mark.parametrize(
    "load",
    [
        {"seed": 0},
        {"seed": 1000},
        {"seed": 2000},
        {"blocks": 768},
        {"programs": 16, "blocks": 256, "token_scale": 0.04, "rate": 0.5, "seed": 3},
    ],
)
def test_most_of_what_is_saved_is_told_and_no_more(profile, load):
    told, measured = told_and_measured(profile, **load)
    assert measured > 100_000, "vLLM loses contexts"
    assert 0.75 <= told / measured <= 1.0


SMALL = {"programs": 16, "token_scale": 0.04}


@pytest.mark.parametrize(
    "load",
    [
        {"blocks": 1000},
        {"blocks": 1000, "seed": 1000},
        {**SMALL, "blocks": 512, "rate": 0.35, "seed": 4},
        {**SMALL, "blocks": 600, "rate": 0.5, "seed": 3},
    ],
)
def test_where_contexts_only_begin_not_to_fit_half_is_told(profile, load):
    told, measured = told_and_measured(profile, **load)
    assert 50_000 < measured < 170_000, "vLLM loses some"
    assert 0.5 <= told / measured <= 1.0


@pytest.mark.parametrize(
    "load",
    [{"blocks": 3000}, {"rate": 0.02}],
    ids=["all contexts fit", "one agent at a time"],
)
def test_what_vllm_keeps_is_not_saved(profile, load):
    told, measured = told_and_measured(profile, **load)
    assert told <= measured
