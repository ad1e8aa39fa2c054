"""The metric definitions against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest

from tests.bench.samples import served
from ttlcache_sim import metrics
from ttlcache_sim.metrics import TurnRecord


def turn(
    program_id: str,
    index: int,
    arrival_s: float,
    departure_s: float,
    prompt: int = 100,
    cached: int = 0,
    queue_s: float = 0.0,
    output: tuple[int, ...] = (1, 2, 3, 4),
    logprob: float = -1.0,
) -> TurnRecord:
    return served(
        program_id,
        index,
        arrival_s,
        first_token_s=arrival_s + queue_s + 0.25,
        departure_s=departure_s,
        queue_s=queue_s,
        prompt_tokens=prompt,
        cached_tokens=cached,
        output_token_ids=output,
        first_logprob=logprob,
    )


def two_programs() -> list[TurnRecord]:
    return [
        turn("b", 0, 2.0, 4.0, prompt=200, queue_s=1.0),
        turn("a", 1, 5.0, 7.0, prompt=300, cached=96, queue_s=0.5),
        turn("a", 0, 0.0, 3.0, prompt=100),
        turn("b", 1, 8.0, 12.0, prompt=400, cached=160),
    ]


def test_summary_of_two_programs():
    # From a program's first arrival to its last departure.
    assert metrics.jct_s(two_programs()) == {"a": 7.0, "b": 10.0}
    summary = metrics.summarize(two_programs())
    assert summary.num_programs == 2
    assert summary.num_turns == 4
    assert summary.mean_jct_s == 8.5
    assert summary.p50_jct_s == 8.5
    assert summary.p90_jct_s == pytest.approx(9.7)
    assert summary.p95_jct_s == pytest.approx(9.85)
    assert summary.p99_jct_s == pytest.approx(9.97)
    assert summary.makespan_s == 12.0
    assert summary.output_tokens_per_s == pytest.approx(16 / 12)
    assert summary.p99_turn_s == pytest.approx(3.97)
    assert summary.mean_running == pytest.approx((2 + 2 + 3 + 4 - 1.5) / 12)
    assert summary.programs_per_s == pytest.approx(2 / 12)
    assert summary.turns_per_min == pytest.approx(4 / 12 * 60)
    assert summary.time_to_90pct_s == 12.0
    assert summary.prompt_hit == pytest.approx(256 / 1000)
    assert summary.mean_wait_s == pytest.approx(1.5 / 4)
    assert summary.mean_ttft_s == pytest.approx((1.25 + 0.75 + 0.25 + 0.25) / 4)
    # "a" left 104 tokens: 96 cached is 92 %; "b" left 204: 160 is 78 %; 90 % is kept.
    assert metrics.kept_gaps(two_programs()) == {("a", 0): True, ("b", 0): False}
    assert summary.kept_gap_share == 0.5
    assert (summary.prompt_tokens, summary.cached_tokens) == (1000, 256)
    assert summary.output_tokens == 16


def test_only_what_lies_between_warm_up_and_drain_counts():
    records = []
    for index in range(6):
        # The first token comes 0.25 s after the queue; sizes tell programs apart.
        queue_s = 40.0 if index == 2 else 0.0
        start_s, end_s = 10.0 * index, 10.0 * index + 50.0 + index
        name = f"p{index}"
        records += [turn(name, 0, start_s, end_s, cached=index, queue_s=queue_s)]
    names = [f"p{index}" for index in range(6)]
    found = metrics.steady(records, names, warm_up=2, drain=1)
    assert found.jct_s == (52.0, 53.0, 54.0)
    assert found.held == (False, True, True)
    assert found.worst_turn_s == 54.0
    assert found.ttft_s[0] == 0.25
    assert found.prompt_hit == pytest.approx((2 + 3 + 4) / 300)
    # From the second completion, at 61 s, to the fifth, at 94 s.
    assert found.programs_per_s == pytest.approx(3 / 33.0)
    whole = metrics.steady(records, names, 0, 0)
    assert whole.programs_per_s == pytest.approx(6 / 105.0)


def test_equal_outputs_compare_equal_whatever_their_order():
    records = two_programs()
    result = metrics.compare_outputs(records, list(reversed(records)))
    assert result.tokens_identical
    assert result.differing_turns == ()
    assert result.first_token_logprob_max_diff == 0.0


def test_differing_and_missing_turns_are_named():
    left = [turn("a", 0, 0, 1, logprob=-1.0), turn("a", 1, 2, 3, logprob=-2.0)]
    right = [turn("a", 0, 0, 1, output=(1, 2, 3, 5), logprob=-1.5)]
    result = metrics.compare_outputs(left, right)
    assert not result.tokens_identical
    assert result.differing_turns == (("a", 0), ("a", 1))
    assert result.first_token_logprob_max_diff == 0.5
    nothing = metrics.compare_outputs(left, [])
    assert not nothing.tokens_identical
    assert math.isnan(nothing.first_token_logprob_max_diff)
