"""Workloads of the sim bench: deterministic, with the stated moments."""

from __future__ import annotations

import itertools
import statistics
from dataclasses import replace

import pytest

from bench.sim.load.feed import Loop
from bench.sim.load.programs import Program, Turn
from bench.sim.load.reshape import fit_context, mean_context
from bench.sim.load.workload import SHAPES, WorkloadSpec, build
from tests.bench.samples import recorded, write_trace

SWE = WorkloadSpec("swe", programs=400, rate=0.1, seed=3)


def _tokens(program: Program) -> int:
    return program.context_tokens


@pytest.mark.parametrize("name", ["swe", "openhands"])
def test_moments_of_a_shape(name):
    shape = SHAPES[name]
    programs = build(replace(SWE, name=name)).programs
    turns = [len(p.turns) for p in programs]
    tokens = [_tokens(p) for p in programs]
    assert statistics.fmean(turns) == pytest.approx(shape.turns.mean, rel=0.05)
    assert statistics.pstdev(turns) == pytest.approx(shape.turns.std, rel=0.2)
    assert statistics.fmean(tokens) == pytest.approx(shape.tokens.mean, rel=0.05)
    assert statistics.pstdev(tokens) == pytest.approx(shape.tokens.std, rel=0.2)


def test_bfcl_is_cut_by_the_context_window():
    programs = build(replace(SWE, name="bfcl")).programs
    assert max(_tokens(p) for p in programs) <= 131_072
    assert statistics.fmean(len(p.turns) for p in programs) == pytest.approx(6.3, 0.1)


def test_same_spec_same_programs_other_seed_others():
    assert build(SWE) == build(SWE)
    assert build(SWE) != build(replace(SWE, seed=4))


def test_poisson_has_the_rate():
    programs = build(replace(SWE, name="bfcl", programs=3000)).programs
    times = [p.arrival_s for p in programs]
    gaps = [after - before for before, after in itertools.pairwise(times)]
    mean = statistics.fmean(gaps)
    assert mean == pytest.approx(10.0, rel=0.15)
    assert statistics.pstdev(gaps) / mean == pytest.approx(1.0, rel=0.15)


def test_closed_loop_starts_with_n():
    assert build(replace(SWE, arrivals="closed:7")).loop == Loop(7)
    with pytest.raises(ValueError, match="closed:N"):
        build(replace(SWE, arrivals="closed:0"))


def test_turn_scale_keeps_the_tokens():
    once = build(replace(SWE, programs=50)).programs
    thrice = build(replace(SWE, programs=50, turn_scale=3)).programs
    for short, long in zip(once, thrice, strict=True):
        assert len(long.turns) == 3 * len(short.turns)
        assert _tokens(long) == pytest.approx(_tokens(short), rel=0.01)
    gaps = {turn.gap_s for turn in thrice[0].turns[:-1]}
    assert len(gaps) == len(thrice[0].turns) - 1  # drawn anew, not copied


def test_a_context_never_exceeds_its_bound():
    turns = (Turn(100, 10, "a", 1.0), Turn(100, 10, "b", 2.0), Turn(5, 5, "c", 3.0))
    kept = fit_context(turns, 225)
    assert [t.new_prompt_tokens for t in kept] == [100, 100]
    assert kept[-1] == Turn(100, 10, "", 0.0)
    (only,) = fit_context(turns, 50)
    assert only.new_prompt_tokens + only.output_tokens == 50


def test_mean_context_is_over_turns():
    turns = (Turn(10, 5, "a", 1.0), Turn(20, 5, "", 0.0))
    assert mean_context((Program("p", 0.0, turns),)) == (15 + 40) / 2


@pytest.fixture
def trace(tmp_path):
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
    return write_trace(tmp_path / "trace.jsonl.gz", *rows)


def test_halves_of_a_trace_are_disjoint(trace):
    def firsts(half: str) -> set[int]:
        spec = WorkloadSpec(f"trace:{trace}", 2, 1.0, 0, half=half)
        return {p.turns[0].new_prompt_tokens for p in build(spec).programs}

    assert firsts("odd") == {100, 102}
    assert firsts("even") == {101, 103}


def test_unknown_gaps_become_the_median_and_the_tool_is_the_executable(trace):
    programs = build(WorkloadSpec(f"trace:{trace}", 4, 1.0, 0)).programs
    by_size = {p.turns[0].new_prompt_tokens: p.turns[0] for p in programs}
    assert by_size[101].gap_s == 3.0
    assert by_size[101].tool == "ls"
    assert all(p.turns[-1].tool == "" for p in programs)


def test_a_short_trace_is_used_again_and_says_so(trace):
    workload = build(WorkloadSpec(f"trace:{trace}", 10, 1.0, 0))
    assert len(workload.programs) == 10
    assert workload.caveat == "each program of the trace comes 2.5 times"
    assert build(WorkloadSpec(f"trace:{trace}", 3, 1.0, 0)).caveat == ""


def test_programs_that_are_longer_than_the_models_context_are_counted(trace):
    # 100 to 103 tokens, their outputs, and a second turn of 7.
    spec = WorkloadSpec(f"trace:{trace}", 4, 1.0, 0)
    sizes = sorted(program.context_tokens for program in build(spec).programs)
    cut = build(replace(spec, max_context=sizes[1]))
    assert cut.num_cut == 2
    assert cut.caveat == "2 of 4 programs are cut to the model's context"
    whole = build(replace(SWE, max_context=10**6))
    longer = [p for p in whole.programs if p.context_tokens > 0.95 * 75_000]
    assert whole.num_cut == 0
    assert build(replace(SWE, max_context=75_000)).num_cut == len(longer) > 0


@pytest.mark.parametrize(
    "change",
    [
        {"name": "nonsense"},
        {"arrivals": "steady"},
        {"rate": 0.0},
        {"programs": 0},
    ],
)
def test_bad_specs_are_refused(change):
    with pytest.raises(ValueError):
        build(replace(SWE, **change))
