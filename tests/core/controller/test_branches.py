"""Several turns of a program at once, and rewritten histories."""

from __future__ import annotations

from tests.core.controller.stories import PROMPT, make_engine, outcomes, pins, total
from ttlcache.testing import FakeEngine
from ttlcache.types import PinOutcome, Urgency


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
    assert total(engine, "claimed_tokens") == 12
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
    assert total(engine, "claimed_tokens") == 8
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
    engine.controller.memory.reclaim(7, Urgency.RUNNING, "somebody")
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
