"""Synthetic programs have the moments of the paper's Table 2."""

from __future__ import annotations

import statistics

import pytest

from bench.sim.load.gap_mix import GapMix
from bench.sim.load.programs import poisson_arrivals
from bench.sim.load.scaled import OUTPUT_SHARE, SCALED_TOOLS, SWE_BENCH, synthetic


def test_turns_and_tokens_have_the_moments_of_the_table() -> None:
    programs = synthetic(4000, rate=1.0, seed=3)
    turns = [len(program.turns) for program in programs]
    tokens = [program.context_tokens for program in programs]
    assert statistics.fmean(turns) == pytest.approx(10.9, rel=0.02)
    assert statistics.stdev(turns) == pytest.approx(2.1, rel=0.05)
    assert statistics.fmean(tokens) == pytest.approx(70_126, rel=0.02)
    assert statistics.stdev(tokens) == pytest.approx(19_732, rel=0.05)
    outputs = sum(turn.output_tokens for p in programs for turn in p.turns)
    assert outputs / sum(tokens) == pytest.approx(OUTPUT_SHARE, rel=0.03)


def test_tool_times_have_exactly_the_moments_of_the_table() -> None:
    moments = GapMix.fit(SWE_BENCH.tool_s, SCALED_TOOLS).moments
    assert moments.mean == pytest.approx(0.925)
    assert moments.std == pytest.approx(3.550)


def test_same_seed_same_programs_and_other_seed_others() -> None:
    assert synthetic(20, 0.5, seed=1) == synthetic(20, 0.5, seed=1)
    assert synthetic(20, 0.5, seed=1) != synthetic(20, 0.5, seed=2)


def test_more_programs_keep_the_first_ones() -> None:
    assert synthetic(30, 0.5, seed=1)[:20] == synthetic(20, 0.5, seed=1)


def test_scaling_tokens_leaves_turns_tools_and_gaps() -> None:
    full = synthetic(10, 0.5, seed=1)
    small = synthetic(10, 0.5, seed=1, token_scale=0.05)
    for whole, part in zip(full, small, strict=True):
        assert [t.gap_s for t in whole.turns] == [t.gap_s for t in part.turns]
        assert [t.tool for t in whole.turns] == [t.tool for t in part.turns]
        assert part.context_tokens == pytest.approx(
            whole.context_tokens * 0.05, rel=0.1
        )


def test_the_last_turn_has_no_tool_and_gaps_are_capped() -> None:
    programs = synthetic(200, 0.5, seed=1, gap_cap_s=2.0)
    assert all(p.turns[-1].tool == "" for p in programs)
    assert all(p.turns[-1].gap_s == 0.0 for p in programs)
    gaps = [turn.gap_s for p in programs for turn in p.turns]
    assert max(gaps) == 2.0
    assert all(turn.tool for p in programs for turn in p.turns[:-1])


def test_arrivals_start_at_zero_with_the_wanted_rate() -> None:
    times = poisson_arrivals(4001, rate=0.5, seed=7)
    assert times[0] == 0.0
    assert list(times) == sorted(times)
    assert times[-1] / 4000 == pytest.approx(2.0, rel=0.05)


@pytest.mark.parametrize(
    "bad",
    [
        {"num_programs": 0},
        {"rate": 0.0},
        {"token_scale": -1.0},
        {"gap_cap_s": 0.0},
    ],
)
def test_sizes_must_be_positive(bad: dict[str, float]) -> None:
    good = {"num_programs": 3, "rate": 1.0, "seed": 0}
    with pytest.raises(ValueError, match="must be positive"):
        synthetic(**{**good, **bad})  # type: ignore[arg-type]
