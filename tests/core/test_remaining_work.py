"""Expected work left of a program, and who is served first for it."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest

from tests.core.stories import token_engine
from ttlcache.programs.model import Work
from ttlcache.scheduling.ordering import LeastWork
from ttlcache.scheduling.remaining_work import (
    DEFAULT_DECODE_S,
    MAX_TURNS,
    RemainingWork,
    mean_residual,
)
from ttlcache.types import Urgency


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
    remaining = after(1, 1, 1, 2, 2)
    run(remaining, 1, 6, end=False)
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


# --- programs of an engine that serves the least work first --------------------


def make_engine():
    limits = {"pool_blocks": 400, "max_ttl_s": 1000.0}
    return token_engine(1000.0, **limits, ordering="least-work")


def run_program(engine, program, turns, end=True):
    """A whole program, each turn 3 new tokens and 4 of output; its context."""
    context = []
    for index in range(turns):
        context += [1000 * ord(program[0]) + len(context) + i for i in range(3)]
        request_id, last = f"{program}-{index}", end and index == turns - 1
        engine.arrive(request_id, context, program=program, is_last_step=last)
        assert engine.admit(request_id)
        for token in range(4):
            engine.clock.advance(0.02 if token else 0.0)
            assert engine.decode(request_id, [7])
        engine.finish(request_id)
        context += [7] * 4
    return context


@pytest.fixture
def taught_engine():
    """Two programs in three end after one turn; who makes two makes eight."""
    engine = make_engine()
    for number in range(4):
        run_program(engine, f"short{number}", 1)
        if number % 2:
            run_program(engine, f"long{number}", 8)
    return engine


def test_the_controller_learns_who_has_more_before_it(taught_engine):
    old = run_program(taught_engine, "old", 2, end=False)
    taught_engine.arrive("old-2", [*old, 1, 2], program="old")
    taught_engine.arrive("new-0", [5, 6], program="new")
    # 1 + 1/3 * 7 turns are before a newcomer, 6 before one that has made two.
    queue = taught_engine.controller.queue
    assert queue.work.turns_left(0) == pytest.approx(10 / 3, rel=0.3)
    assert queue.work.turns_left(2) == pytest.approx(6.0)
    assert queue.priority("new-0")[3:] < queue.priority("old-2")[3:]


def test_a_sub_agent_stands_at_the_level_of_its_parents_work(taught_engine):
    run_program(taught_engine, "parent", 2, end=False)
    taught_engine.arrive("sub-0", [5, 6], program="sub", parent_id="parent")
    queue = taught_engine.controller.queue
    left_s = queue.work.left_s(taught_engine.program("parent").work)
    assert queue.priority("sub-0")[3] == LeastWork().level(left_s)


def test_least_work_takes_the_pins_of_more_work(taught_engine):
    run_program(taught_engine, "old", 2, end=False)
    taught_engine.arrive("new-0", [5, 6], program="new")
    assert taught_engine.reclaim(1, Urgency.WAITING, "new-0") == 1
    # The other way round the order is that of arrival: nobody younger, no pin.
    fcfs = make_engine()
    fcfs.turn("old", [1, 2, 3], program="old")
    fcfs.arrive("new-0", [5, 6], program="new")
    assert fcfs.reclaim(1, Urgency.WAITING, "new-0") == 0


def test_a_long_program_keeps_its_pins_whatever_its_service():
    engine = make_engine()
    context = run_program(engine, "old", 2, end=False)
    engine.arrive("old-2", [*context, 1], program="old")
    assert engine.admit("old-2")
    engine.clock.advance(1e5)
    assert engine.decode("old-2", [7])
    engine.finish("old-2")
    assert not any(pin.quantum_used for pin in engine.controller.pins)
    assert engine.total("quanta_used_up") == 0
