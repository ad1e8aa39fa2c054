"""Stories of programs, told to a controller by a fake engine of 4-token blocks."""

from __future__ import annotations

import math

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from ttlcache.admission import WorkingSet
from ttlcache.controller import ENDED_AT_ONCE, Controller
from ttlcache.costs import CostModel
from ttlcache.events import Admission, Arrival, Finish, Urgency
from ttlcache.finished import UNKNOWN_GAP
from ttlcache.gaps import GapHistory
from ttlcache.hints import Hints
from ttlcache.programs import MAX_OPEN_TURNS
from ttlcache.testing import FakeEngine
from ttlcache.types import (
    APPROVAL_GAP,
    FINAL_GAP,
    PARALLEL_TOOL,
    GapKey,
    IdentityRule,
    PinOutcome,
)

TTL_S = 10.0
PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]  # two full blocks and a half


def make_engine(pool_blocks=64, **config):
    settings = {"policy": "fixed", "policy_options": {"ttl_s": TTL_S}, **config}
    return FakeEngine(settings, pool_blocks=pool_blocks, block_tokens=4)


def outcomes(engine):
    """How many pins ended how."""
    totals = engine.controller.metrics.totals
    return {label: n for (name, label), n in totals.items() if name == "pins"}


def total(engine, name, label=""):
    return engine.controller.metrics.totals[name, label]


def pins(engine):
    return list(engine.controller.pins)


# --- a turn and the next one ---------------------------------------------------


def test_the_next_turn_claims_the_pin():
    engine = make_engine()
    context = engine.turn("r1", PROMPT, [11, 12, 13], program="A")
    assert [pin.kv_blocks for pin in pins(engine)] == [3]  # 12 tokens with KV
    assert engine.holder.free_blocks == 61

    engine.step(seconds=3.0)
    engine.arrive("r2", [*context, 14], program="A")
    assert engine.controller.metrics.observations["gap_seconds"] == [3.0]
    assert engine.admit("r2")
    assert outcomes(engine) == {PinOutcome.CLAIMED: 1}
    assert total(engine, "prefill_tokens_saved") == 12
    assert pins(engine) == []
    engine.check()


def test_a_pin_expires_at_its_deadline():
    engine = make_engine()
    engine.turn("r1", PROMPT, program="A")
    engine.step(seconds=TTL_S - 0.1)
    assert len(pins(engine)) == 1
    engine.step(seconds=0.1)
    assert outcomes(engine) == {PinOutcome.EXPIRED: 1}
    assert engine.controller.metrics.observations["pinned_seconds"] == [TTL_S]
    assert engine.holder.free_blocks == 64


def test_a_pin_whose_turn_waits_in_the_queue_does_not_expire():
    engine = make_engine()
    context = engine.turn("r1", PROMPT, program="A")
    engine.arrive("r2", [*context, 9], program="A")
    engine.step(seconds=100 * TTL_S)
    assert len(pins(engine)) == 1
    assert engine.admit("r2")
    assert outcomes(engine) == {PinOutcome.CLAIMED: 1}


def test_a_return_to_lost_kv_is_counted_and_its_wait_learnt():
    engine = make_engine(pool_blocks=8)
    context = engine.turn("r1", PROMPT, [11, 12, 13], program="A")
    engine.step(seconds=TTL_S)
    engine.turn("other", [*range(100, 128)], program="B", ttl=0)
    engine.arrive("r2", context, program="A")
    engine.step(seconds=4.0)
    engine.admit("r2")
    assert total(engine, "evicted_returns") == 1
    assert engine.controller.costs.queueing_delay_s == 4.0


def test_a_return_that_finds_its_kv_without_a_pin_is_no_loss():
    engine = make_engine()
    context = engine.turn("r1", PROMPT, [11, 12, 13], program="A")
    engine.step(seconds=TTL_S)
    engine.turn("r2", context, program="A")
    assert total(engine, "evicted_returns") == 0


def test_prefill_seconds_are_learnt_once_per_request():
    engine = make_engine()
    before_s = engine.controller.costs.prefill_s(10)
    engine.arrive("r1", PROMPT, program="A")
    engine.controller.prefilled("r1", 10)  # not admitted yet
    assert engine.controller.costs.prefill_s(10) == before_s
    engine.admit("r1")
    engine.clock.advance(5.0)
    engine.decode("r1", [11])
    after_s = engine.controller.costs.prefill_s(10)
    assert after_s != before_s
    engine.clock.advance(500.0)
    engine.decode("r1", [12])
    assert engine.controller.costs.prefill_s(10) == after_s
    engine.controller.prefilled("unknown", 10)


def test_a_preempted_request_is_admitted_twice_but_claims_once():
    engine = make_engine()
    context = engine.turn("r1", PROMPT, [11, 12, 13], program="A")
    engine.arrive("r2", [*context, 14], program="A")
    engine.admit("r2")
    engine.preempt("r2")
    engine.step(seconds=50.0)
    assert engine.admit("r2")
    assert outcomes(engine) == {PinOutcome.CLAIMED: 1}
    assert total(engine, "evicted_returns") == 0
    engine.finish("r2")
    engine.check()


def test_a_decode_without_memory_takes_pins_then_preempts():
    engine = make_engine(pool_blocks=6)
    engine.turn("a", PROMPT, [11, 12, 13], program="A")
    engine.arrive("b", [20, 21, 22, 23], program="B")
    engine.admit("b")
    assert engine.decode("b", [*range(30, 50)])
    assert outcomes(engine) == {PinOutcome.VICTIM: 1}
    assert not engine.decode("b", [30, 31, 32, 33])
    assert engine.holder.num_waiting == 1
    engine.abort("b")
    engine.check()


# --- who waits for whom --------------------------------------------------------


def test_priority_follows_the_program_and_its_pin():
    engine = make_engine()
    context = engine.turn("a1", PROMPT, program="A")
    engine.arrive("b1", [90, 91], program="B")
    engine.arrive("a2", [*context, 1], program="A")
    priority = engine.controller.priority
    assert priority("a2") < priority("b1")
    assert priority("b1", preempted=True) < priority("a2")
    engine.arrive("urgent", [80], program="C", user_priority=-1)
    assert priority("urgent") < priority("b1", preempted=True)
    with pytest.raises(KeyError):
        priority("never arrived")


def test_a_lost_pin_changes_the_priority_and_says_so():
    engine = make_engine()
    context = engine.turn("a1", PROMPT, program="A")
    engine.arrive("a2", [*context, 1], program="A")
    before = engine.controller.priority("a2")
    engine.controller.release_all()
    assert engine.rekeyed == ["a2"]
    assert engine.controller.priority("a2") > before
    assert outcomes(engine) == {PinOutcome.RESET: 1}
    assert engine.admit("a2")
    engine.check()


def test_a_controller_without_a_queue_tells_nobody():
    engine = make_engine()
    quiet = Controller(
        engine.controller.config,
        engine.clock,
        engine.holder,
        block_tokens=4,
        gaps=GapHistory(window=5),
        costs=CostModel(),
    )
    engine.controller = quiet
    context = engine.turn("a1", PROMPT, program="A")
    engine.arrive("a2", [*context, 1], program="A")
    quiet.release_all()
    assert pins(engine) == []


# --- requests that leave without finishing -------------------------------------


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
    assert engine.controller.programs.get(("", "A")).in_flight == 0
    engine.check()


def test_nothing_was_decided_of_an_aborted_request():
    engine = make_engine()
    engine.turn("r1", PROMPT, program="A")
    assert engine.controller.last_decision is not None
    engine.arrive("r2", PROMPT, program="B")
    engine.admit("r2")
    engine.abort("r2")
    assert engine.controller.last_decision is None


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
    assert engine.controller.gaps.num_open == MAX_OPEN_TURNS
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
    assert engine.controller.programs.get(("", "A")).in_flight == 0
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
    assert engine.controller.finish(finish) is None
    assert engine.controller.programs.get(("", "A")).in_flight == 0


@pytest.mark.parametrize("event", ["admit", "finish", "abort"])
def test_events_of_unknown_requests_are_ignored(event):
    controller = make_engine().controller
    if event == "admit":
        controller.admit("unknown", 5)
    else:
        finish = Finish("unknown", event == "finish", 5, 4, [], lambda i, j: [])
        assert controller.finish(finish) is None
    assert not controller.end("", "unknown")


# --- several turns at once -----------------------------------------------------


def test_parallel_branches_claim_their_own_pins():
    engine = make_engine()
    engine.arrive("left", [*PROMPT, 100], program="A")
    engine.arrive("right", [*PROMPT, 200], program="A")
    for name in ("left", "right"):
        engine.admit(name)
        engine.decode(name, [11, 12, 13])
    for name in ("left", "right"):
        engine.finish(name)
    assert len(pins(engine)) == 2
    engine.turn("right2", [*PROMPT, 200, 11, 12, 13], program="A")
    engine.turn("left2", [*PROMPT, 100, 11, 12, 13], program="A")
    assert outcomes(engine) == {PinOutcome.CLAIMED: 2}
    engine.check()


def test_a_sub_agent_does_not_disturb_its_parents_pin():
    engine = make_engine()
    context = engine.turn("parent", PROMPT, [11, 12, 13], program="A", tool="Task")
    engine.turn("child", [*PROMPT[:4], 90, 91, 92, 93, 94], program="A", tool="bash")
    assert len(pins(engine)) == 2
    engine.turn("parent2", [*context, 14], program="A")
    assert total(engine, "prefill_tokens_saved") == 12
    engine.check()


def test_a_rewritten_history_keeps_the_shared_part():
    engine = make_engine()
    engine.turn("r1", PROMPT, [*range(11, 24)], program="A")
    assert [pin.kv_blocks for pin in pins(engine)] == [5]
    engine.arrive("r2", [*PROMPT[:8], 90, 91, 92, 93, 94], program="A")
    assert [pin.kv_blocks for pin in pins(engine)] == [2]
    engine.check()
    engine.admit("r2")
    assert outcomes(engine) == {PinOutcome.CLAIMED: 1}
    assert total(engine, "prefill_tokens_saved") == 8
    # What was rewritten cannot be hit: no loss of the engine's.
    assert total(engine, "evicted_returns") == 0


def test_a_rewritten_history_keeps_every_shared_block():
    # Scenario: 29 of 100 blocks are shared; 29 / 100 * 100 is 28.999 in floats.
    engine = make_engine(pool_blocks=256)
    engine.turn("r1", [*range(1, 401)], [7], program="A")
    engine.arrive("r2", [*range(1, 117), *range(900, 1000)], program="A")
    assert [pin.kv_blocks for pin in pins(engine)] == [29]


def test_a_short_pin_loses_nothing_that_the_rewritten_history_shares():
    # Scenario:
    #   1. Ten blocks are pinned; memory pressure takes all but three.
    #   2. The next prompt shares five blocks: all three can be hit.
    engine = make_engine()
    engine.turn("r1", [*range(1, 41)], [7], program="A")
    engine.controller.reclaim(7, Urgency.RUNNING, "somebody")
    assert [pin.kv_blocks for pin in pins(engine)] == [3]
    engine.arrive("r2", [*range(1, 21), *range(900, 920)], program="A")
    assert [pin.kv_blocks for pin in pins(engine)] == [3]
    engine.check()


def test_a_pin_that_cannot_be_shortened_is_superseded_whole():
    settings = {"policy": "fixed"}
    engine = FakeEngine(settings, block_tokens=4, whole_pins=True)
    engine.turn("r1", PROMPT, [*range(11, 24)], program="A")
    engine.arrive("r2", [*PROMPT[:8], 90, 91], program="A")
    assert outcomes(engine) == {PinOutcome.SUPERSEDED: 1}
    engine.abort("r2")
    engine.check()


# --- programs end --------------------------------------------------------------


def test_an_ended_program_releases_its_pins():
    engine = make_engine()
    engine.turn("r1", PROMPT, program="A")
    assert engine.controller.end("", "A")
    assert not engine.controller.end("", "A")
    assert outcomes(engine) == {PinOutcome.ENDED: 1}
    assert total(engine, "programs_ended", "told") == 1
    assert engine.holder.free_blocks == 64
    assert engine.controller.gaps.num_open == 0
    assert engine.controller.memory.programs == 1


def test_the_last_step_is_not_pinned():
    engine = make_engine()
    context = engine.turn("r1", PROMPT, program="A")
    engine.turn("r2", context, program="A", is_last_step=True)
    assert pins(engine) == []
    assert total(engine, "programs_ended", "last_step") == 1
    assert engine.controller.memory.avg_turns == 2.0
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
    assert engine.finish("r1") is None
    assert engine.controller.memory.programs == 0  # it had finished no turn
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
    assert engine.finish("r2") is None
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
    engine = make_engine(max_programs=2)
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


# --- what a turn tells ---------------------------------------------------------


def gap_key_after(engine, request_id, **hints):
    engine.turn(request_id, PROMPT, program=request_id, **hints)
    program = engine.controller.programs.get(("", request_id))
    return program.open_turns[-1].gap_key


def test_the_gap_key_comes_from_the_hint_then_the_output():
    engine = make_engine()
    engine.next_gap = GapKey("read")
    assert gap_key_after(engine, "1", tool="search") == GapKey("search")
    assert gap_key_after(engine, "2") == GapKey("read")
    assert gap_key_after(engine, "3", tool=["b", "a"]) == GapKey(PARALLEL_TOOL, "a+b")
    assert gap_key_after(engine, "4", tool="ask_user") == APPROVAL_GAP
    engine.next_gap = None
    assert gap_key_after(engine, "5") == FINAL_GAP


@pytest.mark.parametrize(
    ("tools", "key"),
    [
        (["search"], GapKey("search")),
        (["search", "search"], GapKey(PARALLEL_TOOL, "search")),
        (["search", "bash", "read"], GapKey(PARALLEL_TOOL, "bash+read+search")),
        # A person outlasts every tool, and a finishing call ends it all.
        (["search", "ask_user"], APPROVAL_GAP),
        (["finish", "search"], FINAL_GAP),
        (["finish", "ask_user", "search"], APPROVAL_GAP),
        (["", "search"], GapKey("search")),
    ],
)
def test_parallel_tools_of_a_hint(tools, key):
    assert gap_key_after(make_engine(), "r", tool=tools) == key


@pytest.mark.parametrize(
    ("tools", "counts_for_tools"),
    [
        (["search"], True),
        (["search", "read"], True),
        (["ask_user"], False),
        (["ask_user", "search"], False),
        (["finish"], False),
    ],
)
def test_a_persons_pause_says_nothing_about_tools(tools, counts_for_tools):
    engine = make_engine()
    context = engine.turn("r1", PROMPT, program="A", tool=tools)
    engine.step(seconds=5.0)
    engine.turn("r2", context, program="A", is_last_step=True)
    assert engine.controller.gaps.total == int(counts_for_tools)


def test_a_task_beside_other_tools_is_a_sub_agent():
    # Scenario: one call of the turn starts a sub-agent under the same id; its
    # prompt shares the first block only and must not rewrite the parent's turn.
    engine = make_engine()
    engine.turn("parent", PROMPT, [11, 12, 13], program="A", tool=["read", "Task"])
    engine.arrive("child", [*PROMPT[:4], 90, 91, 92, 93], program="A")
    assert [(pin.kv_blocks, pin.held) for pin in pins(engine)] == [(3, False)]
    engine.check()


def test_an_output_nobody_reads_has_an_unknown_gap():
    engine = make_engine()
    record = engine.arrive("r", PROMPT, program="A")
    engine.controller.finish(Finish("r", True, 12, 10, [], lambda i, j: []))
    assert record.program.open_turns[-1].gap_key == UNKNOWN_GAP
    assert pins(engine) == []  # it offered no blocks


def test_malformed_hints_cost_the_pin_and_are_counted():
    engine = make_engine()
    engine.turn("r1", PROMPT, session="A", ttl=-1)
    assert total(engine, "hints_rejected", "duration") == 1
    assert pins(engine) == []
    engine.turn("r2", [*PROMPT, 1, 1], session="A")
    assert len(pins(engine)) == 1
    assert total(engine, "turns_identified", IdentityRule.SESSION) == 2


def test_programs_remember_their_parent_and_class():
    engine = make_engine()
    engine.turn("p", PROMPT, program="parent")
    parent = engine.controller.programs.get(("", "parent"))
    engine.turn("r", PROMPT, program="child", parent_id="parent", priority_class=3)
    program = engine.controller.programs.get(("", "child"))
    assert (program.parent, program.priority_class) == (parent, 3)
    engine.turn("r2", [*PROMPT, 1, 1], program="child")
    assert (program.parent, program.priority_class) == (parent, 3)
    engine.turn("r3", [*PROMPT, 1, 1, 1], program="child", priority_class=0)
    assert program.priority_class == 0


def test_a_change_of_class_between_turns_harms_no_pin():
    engine = make_engine()
    for label in "ABCDE":
        engine.turn(f"{label}1", [ord(label)] * 9, program=label)
    for label in "CBD":
        engine.arrive(f"{label}2", [ord(label)] * 12, program=label, priority_class=9)
        engine.check()
        engine.admit(f"{label}2")
        engine.finish(f"{label}2")
        engine.check()
    engine.step(seconds=TTL_S)
    assert pins(engine) == []
    assert engine.holder.free_blocks == 64


def test_an_anonymous_program_is_recognised_turn_after_turn():
    engine = make_engine()
    context = engine.turn("r1", PROMPT)
    for number in range(2, 6):
        context = engine.turn(f"r{number}", [*context, 50 + number])
    assert total(engine, "turns_identified", IdentityRule.NEW) == 1
    assert total(engine, "turns_identified", IdentityRule.PREFIX) == 4
    assert outcomes(engine) == {PinOutcome.CLAIMED: 4}


def test_switched_off_nothing_is_retained_and_requests_go_on():
    engine = make_engine()
    context = engine.turn("r1", PROMPT, program="A")
    engine.controller.disable()
    assert outcomes(engine) == {PinOutcome.RESET: 1}
    engine.turn("r2", context, program="A")
    assert pins(engine) == []
    assert engine.holder.free_blocks == 64
    engine.check()


def test_a_clock_that_goes_back_harms_nothing():
    engine = make_engine()
    engine.clock.set(1000.0)
    context = engine.turn("r1", PROMPT, program="A")
    engine.step(seconds=-900.0)
    assert len(pins(engine)) == 1
    engine.turn("r2", context, program="A")
    assert engine.controller.metrics.observations["gap_seconds"] == [0.0]
    assert engine.controller.metrics.observations["pinned_seconds"] == [0.0]
    engine.step(seconds=TTL_S)
    assert outcomes(engine) == {PinOutcome.CLAIMED: 1, PinOutcome.EXPIRED: 1}
    engine.check()


# --- whatever happens ----------------------------------------------------------

LABELS = st.sampled_from(["A", "B", "C", None])
TOKENS = st.lists(st.integers(1, 3), min_size=1, max_size=12)
CUTS = st.sampled_from([0, 0, 0, 1, 3, 8])
HINTS = st.sampled_from(
    [
        {},
        {},
        {"priority_class": 2},
        {"ttl": 1},
        {"tool": "Task"},
        {"parent_id": "A"},
        {"parent_id": "B", "tool": "Task"},
        {"ttl": -1},
        {"is_last_step": True},
    ]
)
JUMPS = st.sampled_from([0.0, 0.5, 3.0, TTL_S, 45.0, -0.5, -30.0])


class AnyHistory(RuleBasedStateMachine):
    """Programs in any order of events; the engine's invariants hold after each."""

    @initialize(
        pool_blocks=st.integers(4, 60),
        block_tokens=st.sampled_from([1, 2, 4]),
        fraction=st.sampled_from([0.9, 0.3, 0.0, 1.0]),
        max_programs=st.sampled_from([100, 2]),
        order=st.sampled_from(
            [
                ("ttl-aware", "none"),
                ("ttl-aware", "working-set"),
                ("program-fcfs", "working-set"),
                ("request-fcfs", "none"),
                ("plas", "none"),
            ]
        ),
        whole_pins=st.sampled_from([False, False, True]),
    )
    def start(
        self,
        pool_blocks,
        block_tokens,
        fraction,
        max_programs,
        order,
        whole_pins,
    ):
        ordering, admission = order
        self.engine = FakeEngine(
            {
                "policy": "fixed",
                "policy_options": {"ttl_s": TTL_S},
                "max_pinned_fraction": fraction,
                "program_idle_s": 40.0,
                "max_programs": max_programs,
                "ordering": ordering,
                "admission": admission,
            },
            pool_blocks=pool_blocks,
            block_tokens=block_tokens,
            whole_pins=whole_pins,
        )
        self.contexts = {}
        self.made = 0

    def waiting(self):
        return sorted(r for r, q in self.engine.requests.items() if not q.running)

    def running(self):
        return sorted(r for r, q in self.engine.requests.items() if q.running)

    def pick(self, data, ids):
        return data.draw(st.sampled_from(ids))

    @rule(label=LABELS, cut=CUTS, more=TOKENS, hints=HINTS)
    def arrive(self, label, cut, more, hints):
        self.new_request(label, cut, more, hints)

    def new_request(self, label, cut, more, hints):
        # The prompt extends the program's context, or what a cut leaves of it.
        context = self.contexts.get(label, [1, 2, 3, 1, 2, 3])
        prompt = [*context[: len(context) - cut], *more][:60]
        self.made += 1
        request_id = f"r{self.made}"
        self.engine.arrive(request_id, prompt, program=label, **hints)
        return request_id, prompt

    @rule(label=LABELS, cut=CUTS, more=TOKENS, hints=HINTS, output=TOKENS)
    def whole_turn(self, label, cut, more, hints, output):
        request_id, prompt = self.new_request(label, cut, more, hints)
        if self.engine.admit(request_id) and self.engine.decode(request_id, output):
            self.engine.finish(request_id)
            self.contexts[label] = [*prompt, *output]

    @precondition(lambda self: self.engine.requests)
    @rule(data=st.data(), label=LABELS)
    def reuse_an_id(self, data, label):
        request_id = self.pick(data, sorted(self.engine.requests))
        self.engine.holder.drop(self.engine.requests[request_id].blocks)
        self.engine.arrive(request_id, [1, 2, 3, 1], program=label)

    @precondition(lambda self: self.waiting())
    @rule(data=st.data(), urgency=st.sampled_from([None, *Urgency]))
    def admit(self, data, urgency):
        request_id = self.pick(data, self.waiting())
        alone = not self.running()
        admitted = self.engine.admit(request_id, urgency)
        request = self.engine.requests[request_id]
        needed = -(-len(request.tokens) // self.engine.block_tokens)
        fits = needed <= self.engine.holder.pool_blocks
        if alone and fits and urgency in (None, Urgency.STALLED):
            assert admitted, "wedged: nothing runs and pins hold the pool"

    @precondition(lambda self: self.running())
    @rule(data=st.data(), output=TOKENS)
    def decode(self, data, output):
        self.engine.decode(self.pick(data, self.running()), output)

    @precondition(lambda self: self.running())
    @rule(data=st.data())
    def preempt(self, data):
        self.engine.preempt(self.pick(data, self.running()))

    @precondition(lambda self: self.running())
    @rule(data=st.data())
    def finish(self, data):
        request_id = self.pick(data, self.running())
        label = self.engine.controller.requests[request_id].hints.program_id
        self.contexts[label] = self.engine.requests[request_id].tokens
        self.engine.finish(request_id)

    @precondition(lambda self: self.engine.requests)
    @rule(data=st.data())
    def abort(self, data):
        self.engine.abort(self.pick(data, sorted(self.engine.requests)))

    @rule(seconds=JUMPS)
    def step(self, seconds):
        self.engine.step(seconds)
        now_s = self.engine.clock.now_s()
        assert all(pin.held or pin.deadline_s > now_s for pin in pins(self.engine))

    @rule(needed=st.integers(-1, 50), urgency=st.sampled_from(Urgency), data=st.data())
    def reclaim(self, needed, urgency, data):
        request_id = self.pick(data, ["unknown", *sorted(self.engine.requests)])
        before = self.engine.holder.free_blocks
        freed = self.engine.controller.reclaim(needed, urgency, request_id)
        assert self.engine.holder.free_blocks == before + freed
        if urgency is Urgency.STALLED and freed < needed:
            assert not pins(self.engine)

    @precondition(lambda self: self.waiting())
    @rule(data=st.data())
    def promote(self, data):
        request_id = self.pick(data, self.waiting())
        controller = self.engine.controller
        if controller.promote_at_s(request_id) <= self.engine.clock.now_s():
            controller.promote(request_id)
            assert controller.promote_at_s(request_id) == math.inf

    @precondition(lambda self: self.engine.requests)
    @rule(data=st.data(), blocks=st.integers(0, 50))
    def ask_for_admission(self, data, blocks):
        request_id = self.pick(data, sorted(self.engine.requests))
        answer = self.engine.controller.admission(request_id, blocks)
        if self.engine.controller.requests[request_id].admitted_s is not None:
            assert answer is Admission.ADMIT, "a started request was held back"

    @rule(label=LABELS)
    def end(self, label):
        self.engine.controller.end("", label or "nobody")

    @rule()
    def reset(self):
        self.engine.controller.release_all()
        assert not pins(self.engine)

    @invariant()
    def everything_adds_up(self):
        if not hasattr(self, "engine"):
            return
        controller = self.engine.controller
        self.engine.check()
        for request_id in controller.requests:
            controller.priority(request_id)
        ended = sum(outcomes(self.engine).values())
        assert total(self.engine, "pins_started") == ended + len(controller.pins)

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        engine, controller = self.engine, self.engine.controller
        for request_id in sorted(engine.requests):
            engine.abort(request_id)
        assert controller.requests == {}
        for program in list(controller.programs):
            if not isinstance(program.key, int):
                controller.end(*program.key)
        # Anonymous programs have no id that a client could name: they go idle.
        engine.step(seconds=1000.0)
        engine.step(seconds=1000.0)
        engine.check()
        assert len(controller.programs) == 0
        assert len(controller.pins) == 0
        assert controller.gaps.num_open == 0
        assert engine.holder.free_blocks == engine.holder.pool_blocks
        if isinstance(controller._admission, WorkingSet):
            assert controller._admission.load_blocks(engine.clock.now_s()) == 0.0


TestAnyHistory = AnyHistory.TestCase
TestAnyHistory.settings = settings(
    max_examples=100,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


def test_the_deadline_of_a_pin_is_never_infinite():
    engine = make_engine(policy_options={"ttl_s": math.inf}, max_ttl_s=5.0)
    engine.turn("r", PROMPT, program="A")
    assert engine.controller.pins.next_deadline_s() == 5.0
