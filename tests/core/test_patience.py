"""What a policy asks of the reclaimer: patience in a stall, how a pin is torn."""

from __future__ import annotations

import math

import pytest

from ttlcache.retention.ttl import MAX_STALL_WAIT_S
from ttlcache.testing import FakeEngine
from ttlcache.types import Urgency

STALLED, WAITING, RUNNING = Urgency.STALLED, Urgency.WAITING, Urgency.RUNNING


def make_engine(**config):
    defaults = {
        "policy": "fixed",
        "policy_options": {"ttl_s": 100.0},
        "max_pinned_fraction": 1.0,
    }
    return FakeEngine({**defaults, **config}, pool_blocks=20, block_tokens=1)


def pin(engine, label, blocks=8, stall_wait_s=5.0, min_blocks=None):
    """A program whose pin has been given these properties."""
    prompt = [1000 * ord(label) + i for i in range(blocks)]
    engine.turn(f"{label}-0", prompt, [7], program=label)
    [found] = [p for p in engine.controller.pins if p.program.program_id == label]
    found.stall_until_s = engine.clock.now_s() + stall_wait_s
    found.min_blocks = blocks if min_blocks is None else min_blocks
    return found


def pinned(engine):
    return {p.program.program_id: p.kv_blocks for p in engine.controller.pins}


def test_patience_ends():
    engine = make_engine()
    pin(engine, "A")
    pin(engine, "B")
    engine.arrive("r", list(range(8)), program="R")
    assert not engine.admit("r")
    engine.clock.advance(4.9)
    assert not engine.admit("r")
    engine.clock.advance(0.1)
    assert engine.admit("r")
    assert pinned(engine) == {"A": 8}
    engine.check()


def test_who_is_out_of_patience_goes_if_that_is_enough():
    engine = make_engine()
    pin(engine, "A", stall_wait_s=0.0)
    pin(engine, "B", stall_wait_s=50.0)
    engine.arrive("r", list(range(8)), program="R")
    assert engine.admit("r")
    assert pinned(engine) == {"B": 8}
    engine.arrive("big", list(range(100, 119)), program="S")
    engine.finish("r")
    assert engine.controller.memory.reclaim(19, STALLED, "big") == 0
    assert "B" in pinned(engine)
    engine.check()


def test_no_patience_for_whom_waits_already():
    engine = make_engine()
    held = pin(engine, "A", stall_wait_s=50.0)
    engine.arrive("A-1", [*(65000 + i for i in range(8)), 7, 8], program="A")
    assert held.is_awaited
    engine.arrive("r", list(range(15)), program="R")
    assert engine.admit("r")


def test_no_patience_once_the_policy_has_given_up():
    engine = make_engine()
    pin(engine, "A", stall_wait_s=50.0).policy_deadline_s = engine.clock.now_s()
    engine.arrive("r", list(range(15)), program="R")
    assert engine.admit("r")


def test_the_time_stood_still_counts_against_the_quantum():
    engine = make_engine(quantum_turns=2)
    found = pin(engine, "A", stall_wait_s=50.0)
    program = found.program
    engine.controller.queue.quantum.on_turn(4.0)
    engine.clock.advance(3.0)  # no request waits: that costs nothing
    engine.arrive("r", list(range(15)), program="R")
    for _ in range(5):
        assert not engine.admit("r")
        engine.clock.advance(1.0)
    engine.arrive("A-1", [*(65000 + i for i in range(8)), 7, 8], program="A")
    assert engine.admit("A-1")  # claims
    assert (found.stalled_s, program.place.served_s) == (4.0, 4.0)
    quantum_s = engine.controller.queue.quantum.seconds
    engine.clock.advance(quantum_s)
    engine.finish("A-1")
    assert program.place.is_used_up
    engine.check()


def test_whoever_is_overdue_is_not_told_to_be_patient():
    engine = make_engine()
    pin(engine, "A", stall_wait_s=50.0)
    engine.arrive("r", list(range(15)), program="R")
    assert engine.controller.memory.reclaim(3, STALLED, "r") == 0
    assert engine.controller.memory.reclaim(3, STALLED, "r", patient=False) == 8


@pytest.mark.parametrize("urgency", [WAITING, RUNNING])
def test_patience_is_for_stalls_only(urgency):
    engine = make_engine()
    engine.arrive("r", list(range(8)), program="R")  # older than A
    pin(engine, "A", stall_wait_s=50.0)
    assert engine.controller.memory.reclaim(3, urgency, "r") == 8


def test_a_whole_pin_goes_as_a_whole():
    engine = make_engine()
    pin(engine, "A", min_blocks=0)
    pin(engine, "B")
    engine.arrive("r", [1], program="R")
    assert engine.controller.memory.reclaim(1, RUNNING, "r") == 8
    assert pinned(engine) == {"A": 8}
    assert engine.controller.memory.reclaim(1, RUNNING, "r") == 1
    assert pinned(engine) == {"A": 7}
    engine.check()


def test_a_pin_gives_some_blocks_before_it_goes_as_a_whole():
    engine = make_engine()
    pin(engine, "A", blocks=10, min_blocks=8)
    engine.arrive("r", [1], program="R")
    assert engine.controller.memory.reclaim(2, RUNNING, "r") == 2
    assert pinned(engine) == {"A": 8}
    assert engine.controller.memory.reclaim(1, RUNNING, "r") == 8
    assert pinned(engine) == {}
    engine.check()


def test_adaptive_asks_for_both_within_the_cap():
    engine = make_engine(policy="adaptive", policy_options={})
    context = engine.turn("a", [1, 2, 3, 4], [7, 8], program="A")
    [found] = engine.controller.pins
    stall_wait_s = found.stall_until_s - found.created_s
    recovery_s = engine.controller.costs.recovery_s(len(context) - 1)
    assert stall_wait_s == pytest.approx(recovery_s)
    assert found.min_blocks == math.ceil(0.8 * found.kv_blocks)
    for _ in range(200):  # a dreadfully slow engine
        engine.controller.costs.observe_prefill(4, 0, 1e4)
    engine.turn("b", [11, 12, 13, 14], [7, 8], program="B")
    slow = max(engine.controller.pins, key=lambda p: p.pin_id)
    assert slow.stall_until_s - slow.created_s == MAX_STALL_WAIT_S
