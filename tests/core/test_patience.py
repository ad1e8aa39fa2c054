"""What a policy asks of the reclaimer: patience in a stall, how a pin is torn."""

from __future__ import annotations

import math

import pytest

from tests.core.stories import token_engine
from ttlcache.retention.ttl import MAX_STALL_WAIT_S
from ttlcache.types import Urgency

STALLED, WAITING, RUNNING = Urgency.STALLED, Urgency.WAITING, Urgency.RUNNING
#: The next turn of program A.
NEXT_OF_A = [*(65000 + i for i in range(8)), 7, 8]


@pytest.fixture
def engine():
    return token_engine(100.0, pool_blocks=20)


def pin(engine, label, blocks=8, stall_wait_s=5.0, min_blocks=None):
    """A program whose pin has been given these properties."""
    prompt = [1000 * ord(label) + i for i in range(blocks)]
    engine.turn(f"{label}-0", prompt, [7], program=label)
    [found] = [p for p in engine.pins() if p.program.program_id == label]
    found.stall_until_s = engine.clock.now_s() + stall_wait_s
    found.min_blocks = blocks if min_blocks is None else min_blocks
    return found


def arrive(engine, blocks):
    engine.arrive("r", list(range(blocks)), program="R")


def test_patience_ends(engine):
    pin(engine, "A")
    pin(engine, "B")
    arrive(engine, 8)
    assert not engine.admit("r")
    engine.clock.advance(4.9)
    assert not engine.admit("r")
    engine.clock.advance(0.1)
    assert engine.admit("r")
    assert engine.pinned() == {"A": 8}


def test_who_is_out_of_patience_goes_if_that_is_enough(engine):
    pin(engine, "A", stall_wait_s=0.0)
    pin(engine, "B", stall_wait_s=50.0)
    arrive(engine, 8)
    assert engine.admit("r")
    assert engine.pinned() == {"B": 8}
    engine.arrive("big", list(range(100, 119)), program="S")
    engine.finish("r")
    assert engine.reclaim(19, STALLED, "big") == 0
    assert "B" in engine.pinned()


def test_no_patience_for_whom_waits_already(engine):
    held = pin(engine, "A", stall_wait_s=50.0)
    engine.arrive("A-1", NEXT_OF_A, program="A")
    assert held.is_awaited
    arrive(engine, 15)
    assert engine.admit("r")


def test_no_patience_once_the_policy_has_given_up(engine):
    pin(engine, "A", stall_wait_s=50.0).policy_deadline_s = engine.clock.now_s()
    arrive(engine, 15)
    assert engine.admit("r")


def test_the_time_stood_still_counts_against_the_quantum():
    engine = token_engine(100.0, pool_blocks=20, quantum_turns=2)
    found = pin(engine, "A", stall_wait_s=50.0)
    place, quantum = found.program.place, engine.controller.queue.quantum
    quantum.on_turn(4.0)
    engine.clock.advance(3.0)  # no request waits: that costs nothing
    arrive(engine, 15)
    for _ in range(5):
        assert not engine.admit("r")
        engine.clock.advance(1.0)
    engine.arrive("A-1", NEXT_OF_A, program="A")
    assert engine.admit("A-1")  # claims
    assert (found.stalled_s, place.served_s) == (4.0, 4.0)
    engine.clock.advance(quantum.seconds)
    engine.finish("A-1")
    assert place.is_used_up


def test_whoever_is_overdue_is_not_told_to_be_patient(engine):
    pin(engine, "A", stall_wait_s=50.0)
    arrive(engine, 15)
    assert engine.reclaim(3, STALLED, "r") == 0
    assert engine.reclaim(3, STALLED, "r", patient=False) == 8


@pytest.mark.parametrize("urgency", [WAITING, RUNNING])
def test_patience_is_for_stalls_only(engine, urgency):
    arrive(engine, 8)  # older than A
    pin(engine, "A", stall_wait_s=50.0)
    assert engine.reclaim(3, urgency, "r") == 8


def test_a_whole_pin_goes_as_a_whole(engine):
    pin(engine, "A", min_blocks=0)
    pin(engine, "B")
    arrive(engine, 1)
    assert engine.reclaim(1, RUNNING, "r") == 8
    assert engine.pinned() == {"A": 8}
    assert engine.reclaim(1, RUNNING, "r") == 1
    assert engine.pinned() == {"A": 7}


def test_a_pin_gives_some_blocks_before_it_goes_as_a_whole(engine):
    pin(engine, "A", blocks=10, min_blocks=8)
    arrive(engine, 1)
    assert engine.reclaim(2, RUNNING, "r") == 2
    assert engine.pinned() == {"A": 8}
    assert engine.reclaim(1, RUNNING, "r") == 8
    assert engine.pinned() == {}


def test_adaptive_asks_for_both_within_the_cap():
    engine = token_engine(100.0, pool_blocks=20, policy="adaptive")
    context = engine.turn("a", [1, 2, 3, 4], [7, 8], program="A")
    [found] = engine.pins()
    stall_wait_s = found.stall_until_s - found.created_s
    recovery_s = engine.controller.costs.recovery_s(len(context) - 1)
    assert stall_wait_s == pytest.approx(recovery_s)
    assert found.min_blocks == math.ceil(0.8 * found.kv_blocks)
    for _ in range(200):  # a dreadfully slow engine
        engine.controller.costs.observe_prefill(4, 0, 1e4)
    engine.turn("b", [11, 12, 13, 14], [7, 8], program="B")
    slow = max(engine.pins(), key=lambda p: p.pin_id)
    assert slow.stall_until_s - slow.created_s == MAX_STALL_WAIT_S
