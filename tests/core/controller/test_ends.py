"""Programs end or fall silent; requests leave without finishing."""

import pytest

from tests.core.stories import PROMPT, TTL_S, make_engine
from ttlcache.control import obey
from ttlcache.controller import ENDED_AT_ONCE, NOTHING_RETAINED
from ttlcache.programs.model import MAX_AWAITED_TURNS
from ttlcache.types import Arrival, Finish, Hints, PinOutcome


def test_an_ended_program_releases_its_pins(engine):
    engine.turn("r1", PROMPT, program="A")
    assert engine.end("A")
    assert not engine.end("A")
    assert engine.outcomes() == {PinOutcome.ENDED: 1}
    assert engine.total("programs_ended", "told") == 1
    assert engine.holder.free_blocks == 64
    assert len(engine.controller.gaps._open) == 0
    assert engine.controller.memoryfulness.avg_turns == 1.0


def test_after_its_last_step_nothing_is_pinned_and_its_id_is_a_new_program(engine):
    context = engine.turn("r1", PROMPT, program="A")
    context = engine.turn("r2", context, program="A", is_last_step=True)
    assert engine.pins() == []
    assert engine.total("programs_ended", "last_step") == 1
    assert engine.controller.memoryfulness.avg_turns == 2.0
    engine.turn("r3", context, program="A")
    assert engine.total("programs_started") == 2
    assert len(engine.pins()) == 1


def test_a_program_that_ends_with_a_turn_in_flight(engine):
    engine.arrive("r1", PROMPT, program="A")
    engine.admit("r1")
    engine.end("A")
    engine.decode("r1", [11, 12])
    assert engine.finish("r1") == NOTHING_RETAINED
    assert engine.controller.memoryfulness.avg_turns == 0.0  # it had finished no turn
    assert engine.total("programs_ended", "told") == 1
    assert engine.holder.free_blocks == 64


@pytest.mark.parametrize("how", ["told", "idle"])
def test_the_pin_of_a_last_turn_did_not_expire_too_early(how):
    # Scenario:
    #   1. The pin of turn 1 expires, and turn 2 comes: the TTL was too short.
    #   2. The pin of turn 2 expires, too. Nobody knows yet what that means.
    #   3. The program ends: no TTL would have been of use.
    engine = make_engine(program_idle_s=5 * TTL_S)
    context = engine.turn("r1", PROMPT, program="A")
    engine.step(seconds=TTL_S)
    assert engine.counted_outcomes() == {}
    engine.turn("r2", context, program="A")
    engine.step(seconds=TTL_S)
    assert engine.counted_outcomes() == {PinOutcome.EXPIRED: 1}
    if how == "told":
        engine.end("A")
    engine.step(seconds=6 * TTL_S)
    assert engine.total("programs_ended", how) == 1
    counted = {PinOutcome.EXPIRED: 1, PinOutcome.NO_RETURN: 1}
    assert engine.counted_outcomes() == counted
    assert engine.total("pins_by_tool", "other/no_return") == 1


def test_a_failed_request_leaves_no_program_behind(engine):
    # Scenario: two requests fail before their first token. One named its program:
    # a retry takes its place in the queue, but there is nothing to show of it.
    engine.arrive("r1", PROMPT)
    engine.arrive("r2", PROMPT, program="A")
    for request_id in ("r1", "r2"):
        engine.abort(request_id)
    assert [p.program_id for p in engine.controller.programs] == ["A"]
    assert engine.total("programs_ended", "forgotten") == 1
    assert obey(engine.controller, {"do": "programs"}, 0.0)["programs"] == []
    named = engine.program("A")
    engine.turn("r3", PROMPT, program="A")
    assert engine.program("A") is named
    (row,) = obey(engine.controller, {"do": "programs"}, 0.0)["programs"]
    assert (row["program"], row["turns"]) == ("A", 1)


def test_programs_end_idle_by_silence_and_forgotten_by_number():
    engine = make_engine(1000.0, program_idle_s=60.0)
    engine.controller.programs.max_programs = 2
    for number in range(5):
        engine.turn(f"r{number}", [100 + number] * 9, program=str(number))
    engine.step(seconds=60.0)
    assert [program.program_id for program in engine.controller.programs] == ["3", "4"]
    assert engine.outcomes() == {PinOutcome.ENDED: 3}
    assert engine.total("programs_ended", "forgotten") == 3
    assert engine.total("programs_ended", "idle") == 0
    engine.step(seconds=0.1)
    assert len(engine.controller.programs) == 0
    assert engine.outcomes() == {PinOutcome.ENDED: 5}
    assert engine.total("programs_ended", "forgotten") == 3
    assert engine.total("programs_ended", "idle") == 2


def test_a_step_ends_only_so_many_of_the_programs_that_fell_silent():
    engine = make_engine(program_idle_s=1000.0)
    number = ENDED_AT_ONCE + 9
    for index in range(number):
        engine.turn(f"r{index}", [100 + index] * 9, program=str(index))
    engine.step(seconds=2000.0)
    assert engine.total("programs_ended", "idle") == ENDED_AT_ONCE
    engine.step()
    assert engine.total("programs_ended", "idle") == number


def test_neither_a_waiting_turn_s_pin_nor_its_program_ends():
    engine = make_engine(program_idle_s=5.0)
    context = engine.turn("r1", PROMPT, program="A")
    engine.arrive("r2", context, program="A")
    engine.step(seconds=100 * TTL_S)
    assert len(engine.pins()) == 1
    assert engine.admit("r2")
    assert engine.outcomes() == {PinOutcome.CLAIMED: 1}


# --- requests -----------------------------------------------------------------


def test_aborts_do_not_pile_up_open_turns():
    # Scenario: a crowd of requests holds every awaited turn, as many again finish,
    # then the crowd goes away and gives all its turns back.
    engine = make_engine(pool_blocks=512)
    for n in range(MAX_AWAITED_TURNS):
        engine.turn(f"first-{n}", [100 + n] * 9, program="A")
    for n in range(MAX_AWAITED_TURNS):
        engine.arrive(f"held-{n}", [*[100 + n] * 9, 1, 1, 1], program="A")
    for n in range(MAX_AWAITED_TURNS):
        engine.turn(f"second-{n}", [200 + n] * 9, program="A")
    assert len(engine.pins()) == 2 * MAX_AWAITED_TURNS
    for n in range(MAX_AWAITED_TURNS):
        engine.abort(f"held-{n}")
    assert len(engine.pins()) == MAX_AWAITED_TURNS
    assert engine.outcomes() == {PinOutcome.SUPERSEDED: MAX_AWAITED_TURNS}


def finish_of(request_id, completed=True):
    return Finish(request_id, completed, 5, 4, [], lambda start, stop: [])


def test_an_arrival_that_fails_leaves_nothing_behind(engine):
    engine.turn("r1", PROMPT, program="A")
    broken = Arrival(
        request_id="r2",
        num_tokens=5,
        hashes=None,  # so that comparing it with awaited turns raises
        tokens=lambda start, stop: [],
        hints=Hints(program_id="A"),
    )
    with pytest.raises(TypeError):
        engine.controller.on_arrival(broken)
    engine.check()
    assert engine.controller.requests == {}
    assert engine.controller.on_finished(finish_of("r2")) == NOTHING_RETAINED
    assert engine.program("A").live_requests == 0


def test_events_of_unknown_requests_are_ignored():
    controller = make_engine().controller
    controller.on_allocated("unknown", 5)
    for completed in (True, False):
        finish = finish_of("unknown", completed)
        assert controller.on_finished(finish) == NOTHING_RETAINED
    assert not controller.end_program("", "unknown")
