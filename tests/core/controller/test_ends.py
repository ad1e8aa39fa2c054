"""Programs end, or fall silent."""

from __future__ import annotations

from tests.core.controller.stories import PROMPT, make_engine, outcomes, pins, total
from ttlcache.controller import ENDED_AT_ONCE, NOTHING_RETAINED
from ttlcache.types import PinOutcome


def test_an_ended_program_releases_its_pins():
    engine = make_engine()
    engine.turn("r1", PROMPT, program="A")
    assert engine.controller.end("", "A")
    assert not engine.controller.end("", "A")
    assert outcomes(engine) == {PinOutcome.ENDED: 1}
    assert total(engine, "programs_ended", "told") == 1
    assert engine.holder.free_blocks == 64
    assert len(engine.controller.gaps._open) == 0
    assert engine.controller.memoryfulness.avg_turns == 1.0


def test_the_last_step_is_not_pinned():
    engine = make_engine()
    context = engine.turn("r1", PROMPT, program="A")
    engine.turn("r2", context, program="A", is_last_step=True)
    assert pins(engine) == []
    assert total(engine, "programs_ended", "last_step") == 1
    assert engine.controller.memoryfulness.avg_turns == 2.0
    engine.check()


def test_an_id_that_comes_back_after_its_end_is_a_new_program():
    engine = make_engine()
    context = engine.turn("r1", PROMPT, program="A", is_last_step=True)
    engine.turn("r2", context, program="A")
    assert total(engine, "programs_started") == 2
    assert len(pins(engine)) == 1
    engine.check()


def test_a_program_that_ends_with_a_turn_in_flight():
    engine = make_engine()
    engine.arrive("r1", PROMPT, program="A")
    engine.admit("r1")
    engine.controller.end("", "A")
    engine.decode("r1", [11, 12])
    assert engine.finish("r1") == NOTHING_RETAINED
    assert engine.controller.memoryfulness.avg_turns == 0.0  # it had finished no turn
    assert total(engine, "programs_ended", "told") == 1
    assert engine.holder.free_blocks == 64
    engine.check()


def test_an_ended_programs_waiting_request_still_claims():
    engine = make_engine()
    context = engine.turn("r1", PROMPT, program="A")
    engine.arrive("r2", context, program="A")
    engine.controller.end("", "A")
    assert engine.admit("r2")
    assert outcomes(engine) == {PinOutcome.CLAIMED: 1}
    assert engine.finish("r2") == NOTHING_RETAINED
    engine.check()


def test_an_abort_after_the_end_releases_the_pin_it_held():
    # Scenario:
    #   1. r2 waits and holds the pin of r1; the program is told to have ended.
    #   2. r2 is aborted. Nobody can claim that pin any more: it ends at once.
    engine = make_engine()
    context = engine.turn("r1", PROMPT, program="A")
    engine.arrive("r2", context, program="A")
    engine.controller.end("", "A")
    engine.abort("r2")
    assert outcomes(engine) == {PinOutcome.ENDED: 1}
    assert engine.holder.free_blocks == 64
    engine.check()


def test_a_silent_program_is_forgotten_with_its_pins():
    engine = make_engine(program_idle_s=5.0)
    engine.turn("r1", PROMPT, program="A")
    engine.step(seconds=6.0)
    assert total(engine, "programs_ended", "idle") == 1
    assert outcomes(engine) == {PinOutcome.ENDED: 1}
    assert len(engine.controller.programs) == 0


def test_a_step_ends_only_so_many_of_the_programs_that_fell_silent():
    engine = make_engine(program_idle_s=1000.0)
    number = ENDED_AT_ONCE + 9
    for index in range(number):
        engine.turn(f"r{index}", [100 + index] * 9, program=str(index))
    engine.step(seconds=2000.0)
    assert total(engine, "programs_ended", "idle") == ENDED_AT_ONCE
    engine.step()
    assert total(engine, "programs_ended", "idle") == number
    engine.check()


def test_the_oldest_programs_are_forgotten_when_there_are_too_many():
    engine = make_engine()
    engine.controller.programs.max_programs = 2
    for number in range(5):
        engine.turn(f"r{number}", [100 + number] * 9, program=str(number))
    engine.step()
    labels = [program.program_id for program in engine.controller.programs]
    assert labels == ["3", "4"]
    assert len(pins(engine)) == 2
    engine.check()


def test_a_waiting_program_is_not_forgotten():
    engine = make_engine(program_idle_s=5.0)
    context = engine.turn("r1", PROMPT, program="A")
    engine.arrive("r2", context, program="A")
    engine.step(seconds=1000.0)
    assert len(pins(engine)) == 1
    assert engine.admit("r2")
    engine.check()
