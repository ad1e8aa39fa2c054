"""Who waits for whom, and who is told."""

from __future__ import annotations

import pytest

from tests.core.controller.stories import PROMPT, make_engine, outcomes, pins
from ttlcache.controller import Controller
from ttlcache.estimators.costs import CostModel
from ttlcache.estimators.gap_history import GapHistory
from ttlcache.types import PinOutcome


def test_priority_follows_the_program_and_its_pin():
    engine = make_engine()
    context = engine.turn("a1", PROMPT, program="A")
    engine.arrive("b1", [90, 91], program="B")
    engine.arrive("a2", [*context, 1], program="A")
    priority = engine.controller.queue.priority
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
    before = engine.controller.queue.priority("a2")
    engine.controller.memory.release_all()
    assert engine.rekeyed == ["a2"]
    assert engine.controller.queue.priority("a2") > before
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
    quiet.memory.release_all()
    assert pins(engine) == []
