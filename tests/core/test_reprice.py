"""Pins made while memory was free, once somebody waits for memory."""

from __future__ import annotations

import pytest

from tests.core.test_pins import add, make_program
from tests.core.test_policies_adaptive import history_of, turn_of, view_of
from ttlcache import policies
from ttlcache.policies.adaptive import Adaptive
from ttlcache.retention.pins import PinTable
from ttlcache.retention.ttl import REPRICED_AT_ONCE
from ttlcache.testing import FakeEngine
from ttlcache.types import GapKey, PinOutcome, Pressure, Urgency

WAITING = Urgency.WAITING
MAX_TTL_S = 300.0


class FirstDecisionStands(Adaptive):
    """Never asked again because a request waits."""

    def decide(self, turn, view):
        return super().decide(turn, view)._replace(provisional=False)


policies.register("test-first-decision", f"{__name__}:FirstDecisionStands")


def make_engine(gaps_s=(1.0,) * 60, policy="adaptive"):
    """Blocks of one token; a history in which everybody is back after a second."""
    engine = FakeEngine(
        {
            "policy": policy,
            "max_pinned_fraction": 1.0,
            "max_ttl_s": MAX_TTL_S,
        },
        pool_blocks=20,
        block_tokens=1,
    )
    for gap_s in gaps_s:
        engine.controller.gaps.observe(GapKey("tool"), gap_s)
    return engine


def prompt(label, tokens=8):
    return [1000 * ord(label) + i for i in range(tokens)]


def pinned(engine):
    return {p.program.program_id: p for p in engine.controller.pins}


def run_somebody(engine):
    """What keeps the engine from standing still."""
    engine.arrive("runs", prompt("R", 2), program="R")
    assert engine.admit("runs")


def test_a_silent_program_does_not_keep_later_ones_waiting():
    engine = make_engine()
    engine.turn("A-0", prompt("A", 10), program="A")
    assert pinned(engine)["A"].deadline_s == MAX_TTL_S
    run_somebody(engine)
    engine.step(5.0)  # nobody who was away for so long has come back
    engine.arrive("late", prompt("L", 15), program="L")
    assert engine.admit("late", WAITING)
    assert pinned(engine) == {}
    assert (
        engine.controller.telemetry.metrics.totals["pins", PinOutcome.EXPIRED.value]
        == 1
    )
    engine.check()


def test_what_is_worth_its_memory_stays_for_as_long_as_that():
    engine = make_engine(gaps_s=(10.0,) * 60)
    engine.controller.costs.observe_prefill(10, 0, 60.0)
    engine.turn("A-0", prompt("A", 10), program="A")
    run_somebody(engine)
    engine.step(5.0)
    engine.arrive("late", prompt("L", 15), program="L")
    assert not engine.admit("late", WAITING)
    assert pinned(engine)["A"].deadline_s == pytest.approx(10.0)
    assert not engine.controller.pins._provisional
    engine.check()
    engine.step(5.1)
    assert engine.admit("late", WAITING)


def test_a_decision_that_is_not_provisional_stands():
    engine = make_engine(policy="test-first-decision")
    engine.turn("A-0", prompt("A", 10), program="A")
    run_somebody(engine)
    engine.step(5.0)
    engine.arrive("late", prompt("L", 15), program="L")
    assert not engine.admit("late", WAITING)
    assert pinned(engine)["A"].deadline_s == MAX_TTL_S


def test_a_clients_wish_stays_but_gives_way_to_who_waits():
    engine = make_engine()
    engine.turn("A-0", prompt("A", 10), program="A", ttl=100.0)
    run_somebody(engine)
    engine.step(5.0)
    engine.arrive("small", prompt("S", 6), program="S")
    assert engine.admit("small", WAITING)  # there was room
    assert pinned(engine)["A"].deadline_s == 100.0
    engine.arrive("late", prompt("L", 5), program="L")
    assert engine.admit("late", WAITING)
    engine.check()


def test_a_clients_wish_is_firm_for_as_long_as_the_policy_would_hold():
    engine = make_engine(gaps_s=(10.0,) * 60)
    engine.controller.costs.observe_prefill(10, 0, 60.0)
    engine.clock.advance(1000.0)
    engine.turn("A-0", prompt("A", 10), program="A", ttl=100.0)
    run_somebody(engine)
    engine.step(5.0)
    engine.arrive("late", prompt("L", 15), program="L")
    assert not engine.admit("late", WAITING)
    engine.step(5.1)
    assert engine.admit("late", WAITING)


def test_who_waits_for_its_pin_is_not_asked_about():
    engine = make_engine()
    context = engine.turn("A-0", prompt("A", 10), program="A")
    run_somebody(engine)
    engine.step(5.0)
    engine.arrive("A-1", [*context, 9], program="A")
    engine.arrive("late", prompt("L", 15), program="L")
    assert not engine.admit("late", WAITING)
    assert pinned(engine)["A"].is_awaited
    engine.check()


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


def add_free(pins, number):
    pin = add(pins, make_program(number))
    pins.set_deadline(pin, pin.deadline_s, provisional=True)
    return pin


def test_the_mark_follows_the_last_decision():
    pins = PinTable()
    pin = add_free(pins, 1)
    pins.set_deadline(pin, 5.0)  # as when a tool reports
    assert pin.provisional
    pins.set_deadline(pin, 6.0, provisional=False)
    assert not pin.provisional
    assert not pins._provisional


def test_what_the_policy_says():
    history, turn = history_of([10, 20, 40, 80]), turn_of(4)
    free, full = Pressure(pool_blocks=100), Pressure(pool_blocks=100, num_waiting=1)
    policy = Adaptive()
    assert policy.decide(turn, view_of(history, free)).provisional
    assert not policy.decide(turn, view_of(history, full)).provisional
