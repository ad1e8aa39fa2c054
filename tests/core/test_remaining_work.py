"""Expected work left of a program, and who is served first for it."""

import math
import time

import numpy as np
import pytest

from ttlcache.programs.model import Work
from ttlcache.scheduling.remaining_work import (
    DEFAULT_DECODE_S,
    MAX_TURNS,
    RemainingWork,
    mean_residual,
)


def after(*programs):
    """So many programs of so many turns."""
    remaining = RemainingWork()
    run(remaining, *programs)
    return remaining


def run(remaining, *programs, end=True):
    for turns in programs:
        work = Work()
        for _ in range(turns):
            remaining.on_turn_finished(work, 1.0, 100)
        if end:
            remaining.on_program_end(work)


def test_nothing_is_known_before_five_programs_have_ended():
    remaining = after(3, 3, 3, 3)
    assert remaining.left_s(Work()) is None
    run(remaining, 3)
    assert remaining.turns_left(0) == 3.0


def test_turns_left_of_ended_programs():
    # 1, 1, 2, 4, 4 turns: 12 / 5 before the first; three go on after it, for 1, 3, 3;
    # after the second two, for 2, 2; after the third, for 1, 1.
    remaining = after(1, 1, 2, 4, 4)
    left = [remaining.turns_left(made) for made in range(4)]
    assert left == pytest.approx([12 / 5, 7 / 3, 2.0, 1.0])
    # Longer than anybody known: as many again.
    assert remaining.turns_left(4) == 4.0
    assert remaining.turns_left(10) == 10.0


def test_turns_left_with_programs_under_way():
    # Ended after 1, 1, 1, 2, 2; two are under way after 1 and after 6 turns.
    # P(N > 1) = 1 - 3/7, P(N > 2) = 4/7 (1 - 2/3) = 4/21; those last 2 more.
    remaining = RemainingWork()
    run(remaining, 1, 6, end=False)
    run(remaining, 1, 1, 1, 2, 2)
    beyond = 4 / 21 * 2
    assert remaining.turns_left(0) == pytest.approx(1 + 4 / 7 + beyond)
    assert remaining.turns_left(1) == pytest.approx((4 / 7 + beyond) / (4 / 7))


def test_mean_residual_equals_the_plain_mean_without_censoring():
    lives = np.random.default_rng(0).geometric(0.2, 200)
    ended = np.bincount(lives).astype(float)
    residual = mean_residual(ended, np.zeros_like(ended))
    for made in range(lives.max()):
        later = lives[lives > made]
        assert residual[made] == pytest.approx((later - made).mean())


def test_work_left_by_hand():
    remaining = after(3, 3, 3, 3, 3)
    # A newcomer is everybody: three turns of 1 + 2 seconds, 0.02 s a token.
    assert remaining.left_s(Work()) == pytest.approx(9.0)
    # Its first prompt of 50 s says nothing about the next ones; one output of 5 s
    # against two of everybody's mean, now (15 * 2 + 5) / 16 s.
    mine = Work()
    remaining.on_turn_finished(mine, 50.0, 250)
    output_s = (5.0 + 2 * 35 / 16) / 3
    assert remaining.left_s(mine) == pytest.approx(2 * (1.0 + output_s))
    # The second prompt does: 4 s against two of everybody's mean, (10 + 4) / 11 s.
    remaining.on_turn_finished(mine, 4.0, 250)
    prompt_s = (4.0 + 2 * 14 / 11) / 3
    output_s = (10.0 + 2 * 40 / 17) / 4
    assert remaining.left_s(mine) == pytest.approx(1 * (prompt_s + output_s))


def test_seconds_of_an_output_token_are_those_lately_seen():
    remaining, work = RemainingWork(), Work()
    remaining.on_turn_finished(work, 0.0, 10)
    for token_s in (0.03, 0.05, -1.0, math.nan, math.inf):
        remaining.on_decoded(token_s)
    remaining.on_turn_finished(work, 0.0, 10)
    remaining.on_turn_finished(work, 0.0, -3)
    assert work.output_s == pytest.approx(10 * DEFAULT_DECODE_S + 10 * 0.04)


def test_old_programs_are_forgotten_and_ended_ones_are_not_under_way():
    remaining = after(*[9] * 1000)
    assert remaining.turns_left(0) == 9.0
    run(remaining, *[2] * 1000)
    assert remaining.turns_left(0) == 2.0
    remaining.on_program_end(Work())  # it never finished a turn
    assert remaining.turns_left(0) == 2.0


def test_absurdly_long_programs_cost_no_more_than_long_ones():
    remaining = after(*[2 * MAX_TURNS] * 5)
    started_s = time.process_time()
    assert remaining.turns_left(0) == MAX_TURNS
    assert time.process_time() - started_s < 1.0
