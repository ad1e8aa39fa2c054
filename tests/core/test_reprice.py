"""Pins made while memory was free, once somebody waits for memory."""

from __future__ import annotations

import pytest

from tests.core.stories import make_program, token_engine
from tests.core.test_pins import add
from ttlcache import policies
from ttlcache.policies.adaptive import Adaptive
from ttlcache.retention.pins import PinTable
from ttlcache.retention.ttl import REPRICED_AT_ONCE
from ttlcache.types import GapKey, PinOutcome, Urgency

WAITING = Urgency.WAITING
START_S, MAX_TTL_S = 1000.0, 300.0


class FirstDecisionStands(Adaptive):
    """Never asked again because a request waits."""

    def decide(self, turn, view):
        return super().decide(turn, view)._replace(provisional=False)


policies.register("test-first-decision", f"{__name__}:FirstDecisionStands")


def make_engine(gap_s=1.0, policy="adaptive", **pinned_turn):
    """20 blocks of one token; everybody was back after `gap_s`.

    A's pin of ten blocks was made five seconds ago, when memory was free; another
    request runs, so that the engine does not stand still.
    """
    engine = token_engine(policy=policy, pool_blocks=20, max_ttl_s=MAX_TTL_S)
    engine.clock.set(START_S)
    for _ in range(60):
        engine.controller.gaps.observe(GapKey("tool"), gap_s)
    if gap_s == 10.0:  # worth waiting for
        engine.controller.costs.observe_prefill(10, 0, 60.0)
    engine.turn("A-0", prompt("A", 10), program="A", **pinned_turn)
    engine.arrive("runs", prompt("R", 2), program="R")
    assert engine.admit("runs")
    return engine


def prompt(label, tokens):
    return [1000 * ord(label) + i for i in range(tokens)]


def admitted(engine, label, tokens):
    """Whether a newcomer gets its memory."""
    if label not in engine.requests:
        engine.arrive(label, prompt(label, tokens), program=label)
    return engine.admit(label, WAITING)


def test_a_silent_program_does_not_keep_later_ones_waiting():
    engine = make_engine()
    assert engine.deadlines() == {"A": START_S + MAX_TTL_S}
    engine.step(5.0)  # nobody who was away for so long has come back
    assert admitted(engine, "L", 15)
    assert engine.pinned() == {}
    assert engine.outcomes() == {PinOutcome.EXPIRED: 1}


def test_what_is_worth_its_memory_stays_for_as_long_as_that():
    engine = make_engine(gap_s=10.0)
    engine.step(5.0)
    assert not admitted(engine, "L", 15)
    assert engine.deadlines() == {"A": pytest.approx(START_S + 10.0)}
    assert not engine.controller.pins._provisional
    engine.step(5.1)
    assert admitted(engine, "L", 15)


def test_a_decision_that_is_not_provisional_stands():
    engine = make_engine(policy="test-first-decision")
    engine.step(5.0)
    assert not admitted(engine, "L", 15)
    assert engine.deadlines() == {"A": START_S + MAX_TTL_S}


def test_a_clients_wish_stays_but_gives_way_to_who_waits():
    engine = make_engine(ttl=100.0)
    engine.step(5.0)
    assert admitted(engine, "S", 6)  # there was room
    assert engine.deadlines() == {"A": START_S + 100.0}
    assert admitted(engine, "L", 5)


def test_a_clients_wish_is_firm_for_as_long_as_the_policy_would_hold():
    engine = make_engine(gap_s=10.0, ttl=100.0)
    engine.step(5.0)
    assert not admitted(engine, "L", 15)
    engine.step(5.1)
    assert admitted(engine, "L", 15)


def test_who_waits_for_its_pin_is_not_asked_about():
    engine = make_engine()
    engine.step(5.0)
    engine.arrive("A-1", [*prompt("A", 10), 1, 1, 9], program="A")
    assert not admitted(engine, "L", 15)
    assert [pin.is_awaited for pin in engine.pins()] == [True]


def add_free(pins, number):
    pin = add(pins, make_program(number))
    pins.set_deadline(pin, pin.deadline_s, provisional=True)
    return pin


def test_only_so_many_at_a_time_oldest_first():
    pins = PinTable()
    made = [add_free(pins, number) for number in range(REPRICED_AT_ONCE + 2)]
    add(pins, make_program(999))
    taken = pins.pop_provisional(REPRICED_AT_ONCE)
    assert taken == made[:REPRICED_AT_ONCE]
    assert pins._provisional
    pins.remove(made[-1])
    assert pins.pop_provisional(REPRICED_AT_ONCE) == [made[-2]]
    assert not pins._provisional


def test_the_mark_follows_the_last_decision():
    pins = PinTable()
    pin = add_free(pins, 1)
    pins.set_deadline(pin, 5.0)  # as when a tool reports
    assert pin.provisional
    pins.set_deadline(pin, 6.0, provisional=False)
    assert not pin.provisional
    assert not pins._provisional
