"""What a turn tells, and what nobody tells."""

from __future__ import annotations

import pytest

from tests.core.controller.stories import (
    PROMPT,
    TTL_S,
    make_engine,
    outcomes,
    pins,
    total,
)
from ttlcache.types import (
    APPROVAL_GAP,
    FINAL_GAP,
    PARALLEL_TOOL,
    UNKNOWN_GAP,
    Finish,
    GapKey,
    IdentityRule,
    PinOutcome,
)


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
    assert engine.controller.gaps.count() == int(counts_for_tools)


def test_a_task_beside_other_tools_is_a_sub_agent():
    # Scenario: one call of the turn starts a sub-agent under the same id; its
    # prompt shares the first block only and must not rewrite the parent's turn.
    engine = make_engine()
    engine.turn("parent", PROMPT, [11, 12, 13], program="A", tool=["read", "Task"])
    engine.arrive("child", [*PROMPT[:4], 90, 91, 92, 93], program="A")
    assert [(pin.kv_blocks, pin.is_awaited) for pin in pins(engine)] == [(3, False)]
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
    assert engine.controller.telemetry.metrics.observations["gap_seconds"] == [0.0]
    assert engine.controller.telemetry.metrics.observations["pinned_seconds"] == [0.0]
    engine.step(seconds=TTL_S)
    assert outcomes(engine) == {PinOutcome.CLAIMED: 1, PinOutcome.EXPIRED: 1}
    engine.check()
