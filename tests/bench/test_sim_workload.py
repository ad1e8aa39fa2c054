"""Workloads of the sim bench and of the servers: deterministic, with stated moments."""

import statistics
from dataclasses import replace

import pytest

from bench.serve.scaled import OUTPUT_SHARE, SCALED_TOOLS, SWE_BENCH, synthetic
from tests.bench.samples import recorded, write_trace
from ttlcache_sim.load.gap_mix import GapMix
from ttlcache_sim.load.programs import Turn
from ttlcache_sim.load.reshape import fit_context
from ttlcache_sim.load.shapes import SHAPES
from ttlcache_sim.load.workload import WorkloadSpec, build

SWE = WorkloadSpec("swe", programs=400, rate=0.1, seed=3)


@pytest.mark.parametrize("name", ["swe", "openhands"])
def test_moments_of_a_shape(name):
    shape = SHAPES[name]
    programs = build(replace(SWE, name=name)).programs
    turns = [len(p.turns) for p in programs]
    tokens = [p.context_tokens for p in programs]
    assert statistics.fmean(turns) == pytest.approx(shape.turns.mean, rel=0.05)
    assert statistics.pstdev(turns) == pytest.approx(shape.turns.std, rel=0.2)
    assert statistics.fmean(tokens) == pytest.approx(shape.tokens.mean, rel=0.05)
    assert statistics.pstdev(tokens) == pytest.approx(shape.tokens.std, rel=0.2)


def test_bfcl_is_cut_by_the_context_window():
    programs = build(replace(SWE, name="bfcl")).programs
    assert max(p.context_tokens for p in programs) <= 131_072
    assert statistics.fmean(len(p.turns) for p in programs) == pytest.approx(6.3, 0.1)


def test_same_spec_same_programs_other_seed_others():
    assert build(SWE) == build(SWE) != build(replace(SWE, seed=4))
    ten = synthetic(10, 0.5, seed=1)
    assert ten == synthetic(20, 0.5, seed=1)[:10] != synthetic(10, 0.5, seed=2)


def test_turn_scale_keeps_the_tokens():
    once = build(replace(SWE, programs=50)).programs
    thrice = build(replace(SWE, programs=50, turn_scale=3)).programs
    for short, long in zip(once, thrice, strict=True):
        assert len(long.turns) == 3 * len(short.turns)
        assert long.context_tokens == pytest.approx(short.context_tokens, rel=0.01)
    gaps = {turn.gap_s for turn in thrice[0].turns[:-1]}
    assert len(gaps) == len(thrice[0].turns) - 1  # drawn anew, not copied


def test_a_context_never_exceeds_its_bound():
    turns = (Turn(100, 10, "a", 1.0), Turn(100, 10, "b", 2.0), Turn(5, 5, "c", 3.0))
    kept = fit_context(turns, 225)
    assert [t.new_prompt_tokens for t in kept] == [100, 100]
    assert kept[-1] == Turn(100, 10, "", 0.0)
    (only,) = fit_context(turns, 50)
    assert only.new_prompt_tokens + only.output_tokens == 50


# --- of a trace --------------------------------------------------------------


@pytest.fixture
def of_trace(tmp_path):
    """The workload of a trace of four programs: so many of them, of one half."""
    shell = {"tool": "bash", "exe": "ls"}
    end = {"new_prompt_tokens": 7, "tool": None}
    rows = [
        recorded(
            {**shell, "new_prompt_tokens": 100 + i, "tool_s": gap_s},
            end,
            program_id=f"p{i}",
        )
        for i, gap_s in enumerate([1.0, None, 3.0, 5.0])
    ]
    path = write_trace(tmp_path / "trace.jsonl.gz", *rows)
    return lambda programs, **more: build(
        WorkloadSpec(f"trace:{path}", programs, 1.0, 0, **more)
    )


def test_a_short_trace_is_used_again_and_says_so(of_trace):
    workload = of_trace(10)
    assert len(workload.programs) == 10
    assert workload.caveat == "each program of the trace comes 2.5 times"
    assert of_trace(3).caveat == ""


def test_programs_that_are_longer_than_the_models_context_are_counted(of_trace):
    # 100 to 103 tokens, their outputs, and a second turn of 7.
    sizes = sorted(program.context_tokens for program in of_trace(4).programs)
    cut = of_trace(4, max_context=sizes[1])
    assert cut.num_cut == 2
    assert cut.caveat == "2 of 4 programs are cut to the model's context"
    whole = build(replace(SWE, max_context=10**6))
    longer = [p for p in whole.programs if p.context_tokens > 0.95 * 75_000]
    assert whole.num_cut == 0
    assert build(replace(SWE, max_context=75_000)).num_cut == len(longer) > 0


# --- scaled to the servers' model --------------------------------------------


def test_scaled_programs_have_the_moments_of_the_table():
    programs = synthetic(4000, rate=1.0, seed=3)
    turns = [len(program.turns) for program in programs]
    tokens = [program.context_tokens for program in programs]
    assert statistics.fmean(turns) == pytest.approx(10.9, rel=0.02)
    assert statistics.stdev(turns) == pytest.approx(2.1, rel=0.05)
    assert statistics.fmean(tokens) == pytest.approx(70_126, rel=0.02)
    assert statistics.stdev(tokens) == pytest.approx(19_732, rel=0.05)
    outputs = sum(turn.output_tokens for p in programs for turn in p.turns)
    assert outputs / sum(tokens) == pytest.approx(OUTPUT_SHARE, rel=0.03)
    moments = GapMix.fit(SWE_BENCH.tool_s, SCALED_TOOLS).moments
    assert moments.mean == pytest.approx(0.925)
    assert moments.std == pytest.approx(3.550)
