"""What a turn tells, and what nobody tells."""

import pytest

from tests.core.stories import PROMPT, TTL_S
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


@pytest.mark.parametrize(
    ("tool", "output", "key"),
    [
        ("search", GapKey("read"), GapKey("search")),
        (None, GapKey("read"), GapKey("read")),
        (None, None, FINAL_GAP),
        ("ask_user", GapKey("read"), APPROVAL_GAP),
        (["finish"], GapKey("read"), FINAL_GAP),
        (["search", "search"], None, GapKey(PARALLEL_TOOL, "search")),
        (["search", "bash", "read"], None, GapKey(PARALLEL_TOOL, "bash+read+search")),
        # A person outlasts every tool, and a finishing call ends it all.
        (["search", "ask_user"], None, APPROVAL_GAP),
        (["finish", "search"], None, FINAL_GAP),
        (["finish", "ask_user", "search"], None, APPROVAL_GAP),
        (["", "search"], None, GapKey("search")),
    ],
)
def test_the_gap_key_comes_from_the_hint_then_the_output(engine, tool, output, key):
    engine.next_gap = output
    context = engine.turn("r1", PROMPT, program="A", tool=tool)
    assert engine.program("A").awaited_turns[-1].gap_key == key
    engine.step(seconds=5.0)
    engine.turn("r2", context, program="A", is_last_step=True)
    # A person's pause says nothing about tools.
    assert engine.controller.gaps.count() == (key not in (APPROVAL_GAP, FINAL_GAP))


def test_an_output_nobody_reads_has_an_unknown_gap(engine):
    record = engine.arrive("r", PROMPT, program="A")
    engine.controller.on_finished(Finish("r", True, 12, 10, [], lambda i, j: []))
    assert record.program.awaited_turns[-1].gap_key == UNKNOWN_GAP
    assert engine.pins() == []  # it offered no blocks


def test_malformed_hints_cost_the_pin_and_are_counted(engine):
    engine.turn("r1", PROMPT, session="A", ttl=-1)
    assert engine.total("hints_rejected", "duration") == 1
    assert engine.pins() == []
    engine.turn("r2", [*PROMPT, 1, 1], session="A")
    assert len(engine.pins()) == 1
    assert engine.total("turns_identified", IdentityRule.SESSION) == 2


def test_programs_remember_their_class(engine):
    context = engine.turn("r", PROMPT, program="A", priority_class=3)
    assert engine.program("A").priority_class == 3
    context = engine.turn("r2", context, program="A")
    assert engine.program("A").priority_class == 3
    engine.turn("r3", context, program="A", priority_class=0)
    assert engine.program("A").priority_class == 0


def test_a_clock_that_goes_back_harms_nothing(engine):
    engine.clock.set(1000.0)
    context = engine.turn("r1", PROMPT, program="A")
    engine.step(seconds=-900.0)
    assert len(engine.pins()) == 1
    engine.turn("r2", context, program="A")
    assert engine.observed("gap_seconds") == [0.0]
    assert engine.observed("pinned_seconds") == [0.0]
    engine.step(seconds=TTL_S)
    assert engine.outcomes() == {PinOutcome.CLAIMED: 1, PinOutcome.EXPIRED: 1}
