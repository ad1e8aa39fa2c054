"""What a policy asks of the reclaimer, and of pins made while memory was free."""

import math

import pytest

from tests.core.stories import token_engine
from ttlcache import policies
from ttlcache.policies.adaptive import Adaptive
from ttlcache.retention.decisions import MAX_STALL_WAIT_S
from ttlcache.types import GapKey, PinOutcome, Urgency

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
    assert held.has_claimant
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
    quantum.on_turn(4.0, is_first=False)
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
    # A dreadfully slow engine.
    engine.controller.costs._steps.prefill = (2_500.0, 0.0, 0.0)
    engine.turn("b", [11, 12, 13, 14], [7, 8], program="B")
    slow = max(engine.pins(), key=lambda p: p.pin_id)
    assert slow.stall_until_s - slow.created_s == MAX_STALL_WAIT_S


# --- pins made while memory was free, once a request waits for memory


START_S, MAX_TTL_S = 1000.0, 300.0


class FirstDecisionStands(Adaptive):
    """Never asked again because a request waits."""

    def decide(self, turn, view):
        return super().decide(turn, view)._replace(uncontended=False)


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
        engine.controller.costs._steps.prefill = (6.0, 0.0, 0.0)
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
    assert not engine.controller.pins._uncontended
    engine.step(5.1)
    assert admitted(engine, "L", 15)


def test_a_decision_made_under_contention_stands():
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
    assert [pin.has_claimant for pin in engine.pins()] == [True]
