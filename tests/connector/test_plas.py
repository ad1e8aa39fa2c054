"""Program-level attained service on vLLM's real scheduler, one sequence at a time."""

from __future__ import annotations

import pytest

from tests.connector.conftest import free
from tests.connector.test_allocation import admission_order, start

PLAS = {"policy": "none", "ordering": "plas"}


@pytest.fixture
def engine(make_engine, async_scheduling):
    return make_engine(
        num_blocks=200,
        max_num_seqs=1,
        async_scheduling=async_scheduling,
        extra_config=PLAS,
    )


def serve(engine, clock, program, seconds, *, turn=1):
    """One call of a program that runs for `seconds`."""
    start(engine, program, 40, turn=turn)
    engine.step()
    clock.advance(seconds)
    engine.run()


def block_the_seat(engine):
    """A long call of program R takes the only seat."""
    start(engine, "R", 40, max_tokens=30)
    engine.step()


def test_the_least_served_program_goes_first(engine, clock):
    serve(engine, clock, "A", 5.0)
    serve(engine, clock, "B", 1.2)
    serve(engine, clock, "C", 0.5)
    block_the_seat(engine)
    for program in "ABC":
        start(engine, program, 40, turn=2)
    start(engine, "N", 40)  # new, as good as C: both below one second
    assert admission_order(engine) == ["C-2", "N-1", "B-2", "A-2"]
    assert free(engine) == 199


def test_service_adds_up_over_calls(engine, clock):
    for turn in (1, 2, 3):
        serve(engine, clock, "A", 1.5, turn=turn)
    serve(engine, clock, "B", 2.5)
    block_the_seat(engine)
    start(engine, "A", 40, turn=4)  # 4.5 s in three calls
    start(engine, "B", 40, turn=2)
    assert admission_order(engine) == ["B-2", "A-4"]


def test_a_starved_call_is_promoted_to_the_first_queue(engine, clock):
    # A was served for 2 s: after 8 s of waiting its call is promoted, and stands
    # before new programs that came later, until then behind them.
    serve(engine, clock, "A", 2.0)
    block_the_seat(engine)
    start(engine, "A", 40, turn=2)
    start(engine, "N", 40)
    clock.advance(7.9)
    waiting = engine.scheduler.waiting
    assert waiting.peek_request().request_id == "N-1"
    clock.advance(0.2)
    assert admission_order(engine) == ["A-2", "N-1"]
    program = engine.connector.side.controller.programs.get(("", "A"))
    assert program.attained is None  # counted anew since the promotion
    assert free(engine) == 199


def test_preempted_calls_resume_first_and_everything_finishes(make_engine, clock):
    engine = make_engine(num_blocks=30, extra_config=PLAS)
    requests = [start(engine, program, 60, max_tokens=80) for program in "ABCDE"]
    while engine.scheduler.has_unfinished_requests():
        engine.step()
        clock.advance(0.3)
    assert sum(request.num_preemptions for request in requests) > 0
    assert len(engine.finished) == 5
    assert free(engine) == 29
