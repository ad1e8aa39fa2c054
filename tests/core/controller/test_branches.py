"""Several turns of a program at once, and rewritten histories."""

from __future__ import annotations

import pytest

from tests.core.stories import PROMPT, make_engine
from ttlcache.types import PinOutcome, Urgency


def test_parallel_branches_claim_their_own_pins(engine):
    engine.arrive("left", [*PROMPT, 100], program="A")
    engine.arrive("right", [*PROMPT, 200], program="A")
    for name in ("left", "right"):
        engine.admit(name)
        engine.decode(name, [11, 12, 13])
    for name in ("left", "right"):
        assert engine.finish(name).decision is not None
    assert len(engine.pins()) == 2
    engine.turn("right2", [*PROMPT, 200, 11, 12, 13], program="A")
    engine.turn("left2", [*PROMPT, 100, 11, 12, 13], program="A")
    assert engine.outcomes() == {PinOutcome.CLAIMED: 2}


@pytest.mark.parametrize("tool", ["Task", ["read", "Task"]])
def test_a_sub_agent_does_not_disturb_its_parents_pin(engine, tool):
    # Scenario: a call of the turn, alone or beside others, starts a sub-agent under
    # the same id; its prompt shares the first block only.
    context = engine.turn("parent", PROMPT, [11, 12, 13], program="A", tool=tool)
    engine.arrive("child", [*PROMPT[:4], 90, 91, 92, 93, 94], program="A")
    assert [(pin.kv_blocks, pin.is_awaited) for pin in engine.pins()] == [(3, False)]
    engine.admit("child")
    engine.finish("child")
    assert len(engine.pins()) == 2
    engine.turn("parent2", [*context, 14], program="A")
    assert engine.total("claimed_tokens") == 12


def test_a_rewritten_history_keeps_the_shared_part(engine):
    engine.turn("r1", PROMPT, [*range(11, 24)], program="A")
    assert engine.pinned() == {"A": 5}
    engine.arrive("r2", [*PROMPT[:8], 90, 91, 92, 93, 94], program="A")
    assert engine.pinned() == {"A": 2}
    engine.admit("r2")
    assert engine.outcomes() == {PinOutcome.CLAIMED: 1}
    assert engine.total("claimed_tokens") == 8
    # What was rewritten cannot be hit: no loss of the engine's.
    assert engine.total("evicted_returns") == 0


def test_a_rewritten_history_keeps_every_shared_block():
    # Scenario: 29 of 100 blocks are shared; 29 / 100 * 100 is 28.999 in floats.
    engine = make_engine(pool_blocks=256)
    engine.turn("r1", [*range(1, 401)], [7], program="A")
    engine.arrive("r2", [*range(1, 117), *range(900, 1000)], program="A")
    assert engine.pinned() == {"A": 29}


def test_a_short_pin_loses_nothing_that_the_rewritten_history_shares(engine):
    # Scenario:
    #   1. Ten blocks are pinned; memory pressure takes all but three.
    #   2. The next prompt shares five blocks: all three can be hit.
    engine.turn("r1", [*range(1, 41)], [7], program="A")
    engine.reclaim(7, Urgency.RUNNING, "somebody")
    assert engine.pinned() == {"A": 3}
    engine.arrive("r2", [*range(1, 21), *range(900, 920)], program="A")
    assert engine.pinned() == {"A": 3}
