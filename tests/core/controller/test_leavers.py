"""Requests that leave without finishing, or were never known."""

from __future__ import annotations

import pytest

from tests.core.controller.stories import PROMPT, TTL_S, make_engine, outcomes, pins
from ttlcache.controller import NOTHING_RETAINED
from ttlcache.programs.model import MAX_OPEN_TURNS
from ttlcache.types import Arrival, Finish, Hints, PinOutcome


@pytest.mark.parametrize("stage", ["waiting", "running", "decoded", "preempted"])
def test_an_aborted_request_pins_nothing(stage):
    engine = make_engine()
    engine.arrive("r", PROMPT, program="A")
    if stage != "waiting":
        engine.admit("r")
    if stage == "decoded":
        engine.decode("r", [11, 12])
    if stage == "preempted":
        engine.preempt("r")
    engine.abort("r")
    assert engine.controller.requests == {}
    assert pins(engine) == []
    assert engine.holder.free_blocks == 64
    assert engine.controller.programs.get(("", "A")).live_requests == 0
    engine.check()


def test_nothing_was_decided_of_an_aborted_request():
    engine = make_engine()
    for request_id in ("r1", "r2"):
        engine.arrive(request_id, PROMPT, program="A")
        engine.admit(request_id)
    assert engine.finish("r1").decision is not None
    assert engine.abort("r2").decision is None


def test_an_abort_while_waiting_gives_the_claim_back():
    # Scenario:
    #   1. r2 waits and holds the pin of r1.
    #   2. The client goes away; the deadline counts again.
    #   3. A retry claims the same pin.
    engine = make_engine()
    context = engine.turn("r1", PROMPT, [11, 12, 13], program="A")
    engine.arrive("r2", context, program="A")
    engine.abort("r2")
    engine.check()
    engine.step(seconds=TTL_S - 1)
    engine.turn("r3", context, program="A")
    assert outcomes(engine) == {PinOutcome.CLAIMED: 1}
    engine.check()


def test_a_claim_given_back_too_late_expires_at_the_next_step():
    engine = make_engine()
    context = engine.turn("r1", PROMPT, program="A")
    engine.arrive("r2", context, program="A")
    engine.step(seconds=2 * TTL_S)
    engine.abort("r2")
    engine.step()
    assert outcomes(engine) == {PinOutcome.EXPIRED: 1}


def test_aborts_do_not_pile_up_open_turns():
    # Scenario: a crowd of requests holds every open turn, as many again finish,
    # then the crowd goes away and gives all its turns back.
    engine = make_engine(pool_blocks=512)
    prompts = [[100 + n] * 9 for n in range(2 * MAX_OPEN_TURNS)]
    first, second = prompts[:MAX_OPEN_TURNS], prompts[MAX_OPEN_TURNS:]
    for n, prompt in enumerate(first):
        engine.turn(f"first-{n}", prompt, program="A")
    for n, prompt in enumerate(first):
        engine.arrive(f"held-{n}", [*prompt, 1, 1, 1], program="A")
    for n, prompt in enumerate(second):
        engine.turn(f"second-{n}", prompt, program="A")
    assert len(pins(engine)) == 2 * MAX_OPEN_TURNS
    for n in range(MAX_OPEN_TURNS):
        engine.abort(f"held-{n}")
        engine.check()
    assert len(pins(engine)) == MAX_OPEN_TURNS
    assert outcomes(engine) == {PinOutcome.SUPERSEDED: MAX_OPEN_TURNS}


def test_a_program_keeps_a_bounded_number_of_open_turns():
    engine = make_engine(pool_blocks=512)
    for n in range(MAX_OPEN_TURNS + 3):
        engine.arrive("busy", [7], program="A")  # so that prompts branch
        engine.turn(f"r{n}", [100 + n] * 9, program="A")
        engine.abort("busy")
    assert len(pins(engine)) == MAX_OPEN_TURNS
    assert outcomes(engine) == {PinOutcome.SUPERSEDED: 3}
    assert len(engine.controller.gaps._open) == MAX_OPEN_TURNS
    engine.check()


def test_the_same_request_id_twice_leaves_nothing_behind():
    # Scenario:
    #   1. r2 waits and holds the pin of r1; its end is never told.
    #   2. The engine uses the id again, for another program.
    #   3. The pin expires as if r2 had gone, and no program looks busy for ever.
    engine = make_engine()
    context = engine.turn("r1", PROMPT, program="A")
    engine.arrive("r2", context, program="A")
    engine.arrive("r2", [50, 51], program="B")
    assert engine.controller.programs.get(("", "A")).live_requests == 0
    engine.check()
    engine.step(seconds=TTL_S)
    assert outcomes(engine) == {PinOutcome.EXPIRED: 1}
    engine.admit("r2")
    engine.finish("r2")
    assert engine.controller.requests == {}
    engine.check()


def test_an_arrival_that_fails_leaves_nothing_behind():
    engine = make_engine()
    engine.turn("r1", PROMPT, program="A")
    broken = Arrival(
        request_id="r2",
        num_tokens=5,
        hashes=None,  # so that comparing it with open turns raises
        tokens=lambda start, stop: [],
        hints=Hints(program_id="A"),
    )
    with pytest.raises(TypeError):
        engine.controller.arrive(broken)
    engine.check()
    assert engine.controller.requests == {}
    finish = Finish("r2", True, 5, 4, [], lambda i, j: [])
    assert engine.controller.finish(finish) == NOTHING_RETAINED
    assert engine.controller.programs.get(("", "A")).live_requests == 0


@pytest.mark.parametrize("event", ["admit", "finish", "abort"])
def test_events_of_unknown_requests_are_ignored(event):
    controller = make_engine().controller
    if event == "admit":
        controller.on_allocated("unknown", 5)
    else:
        finish = Finish("unknown", event == "finish", 5, 4, [], lambda i, j: [])
        assert controller.finish(finish) == NOTHING_RETAINED
    assert not controller.end("", "unknown")
