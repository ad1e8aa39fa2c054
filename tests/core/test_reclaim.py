"""Which pins give way. Programs are numbered by arrival: A before B before C."""

from __future__ import annotations

import pytest

from ttlcache.testing import FakeEngine
from ttlcache.types import PinOutcome, ReleaseMode, Urgency

WAITING, RUNNING, STALLED = Urgency.WAITING, Urgency.RUNNING, Urgency.STALLED


def make_engine(pool_blocks=32, **kwargs):
    config = {"policy": "fixed", "policy_options": {"ttl_s": 60.0}}
    config["max_pinned_fraction"] = 1.0
    return FakeEngine(config, pool_blocks=pool_blocks, block_tokens=1, **kwargs)


def pin_of(engine, label):
    return next(p for p in engine.controller.pins if p.program.program_id == label)


def pinned(engine):
    """Blocks pinned per program."""
    return {p.program.program_id: p.kv_blocks for p in engine.controller.pins}


def pin_blocks(engine, label, count, first_token=None):
    """A program of its own with `count` pinned blocks; its context."""
    start = first_token if first_token is not None else 1000 * ord(label)
    prompt = list(range(start, start + count))
    return engine.turn(f"{label}-1", prompt, [7], program=label)


def victims(engine):
    return engine.controller.telemetry.metrics.totals["pins", PinOutcome.VICTIM]


def test_the_latest_program_goes_first_tail_first_and_no_more_than_needed():
    engine = make_engine()
    for label in "ABC":
        pin_blocks(engine, label, 4)
    engine.arrive("r", [1], program="R")
    before = list(engine.holder.held[pin_of(engine, "C").pin_id])
    assert engine.controller.memory.reclaim(2, RUNNING, "r") == 2
    assert pinned(engine) == {"A": 4, "B": 4, "C": 2}
    assert engine.holder.held[pin_of(engine, "C").pin_id] == before[:2]
    assert engine.controller.memory.reclaim(3, RUNNING, "r") == 3
    assert pinned(engine) == {"A": 4, "B": 3}
    assert victims(engine) == 1
    engine.check()


@pytest.mark.parametrize("mode", [ReleaseMode.COPY_FIRST, ReleaseMode.FREE_NOW])
def test_the_holder_is_told_how_blocks_are_released(mode):
    engine = make_engine()
    for label in "ABC":
        pin_blocks(engine, label, 4)
    asked = []
    release, shrink = engine.holder.release, engine.holder.shrink
    engine.holder.release = lambda *args: asked.append(args[1:]) or release(*args)
    engine.holder.shrink = lambda *args: asked.append(args[1:]) or shrink(*args)
    engine.controller.memory.reclaim(6, RUNNING, "unknown", mode=mode)
    assert asked == [(PinOutcome.VICTIM, mode), (2, mode)]
    asked.clear()
    engine.controller.end("", "A")
    assert asked == [(PinOutcome.ENDED, ReleaseMode.KEEP_CACHED)]


def test_asking_for_nothing_asks_for_one_block():
    engine = make_engine()
    pin_blocks(engine, "A", 4)
    assert engine.controller.memory.reclaim(0, RUNNING, "unknown") == 1
    assert pinned(engine) == {"A": 3}


def test_a_waiting_request_takes_from_younger_programs_only():
    engine = make_engine()
    pin_blocks(engine, "A", 4)
    engine.arrive("b", [1], program="B")
    pin_blocks(engine, "C", 4)
    assert engine.controller.memory.reclaim(3, WAITING, "b") == 3
    assert pinned(engine) == {"A": 4, "C": 1}
    # One block of C is all that B may have: taking it would be waste.
    assert engine.controller.memory.reclaim(2, WAITING, "b") == 0
    assert pinned(engine) == {"A": 4, "C": 1}
    assert engine.controller.memory.reclaim(1, WAITING, "b") == 1
    assert pinned(engine) == {"A": 4}
    assert engine.controller.memory.reclaim(1, WAITING, "b") == 0
    engine.check()


def test_what_pins_share_is_offered_once():
    engine = make_engine()
    engine.arrive("b", [1], program="B")
    for label in "CDE":
        pin_blocks(engine, label, 4, first_token=9000)
    assert pinned(engine) == {"C": 4, "D": 4, "E": 4}
    # Three blocks are common, the last one was computed for each of them.
    assert engine.controller.memory.reclaim(7, WAITING, "b") == 0
    assert pinned(engine) == {"C": 4, "D": 4, "E": 4}
    assert engine.controller.memory.reclaim(6, WAITING, "b") == 6
    assert pinned(engine) == {}
    engine.check()


def test_a_waiting_request_leaves_pins_alone_that_are_about_to_pay_off():
    engine = make_engine()
    engine.arrive("a", [1], program="A")
    context = pin_blocks(engine, "B", 4)
    engine.arrive("b", context, program="B")
    assert engine.controller.memory.reclaim(1, WAITING, "a") == 0
    assert engine.controller.memory.reclaim(1, RUNNING, "a") == 1


def test_a_request_that_never_arrived_waits_behind_all_programs():
    engine = make_engine()
    pin_blocks(engine, "A", 4)
    assert engine.controller.memory.reclaim(1, WAITING, "unknown") == 0
    assert engine.controller.memory.reclaim(9, STALLED, "unknown") == 4


def test_the_own_pin_goes_only_when_the_engine_is_stalled():
    engine = make_engine()
    context = pin_blocks(engine, "A", 4)
    pin_blocks(engine, "B", 4)
    engine.arrive("a", [*context, 1], program="A")
    assert engine.controller.memory.reclaim(9, RUNNING, "a") == 4
    assert pinned(engine) == {"A": 4}
    assert engine.controller.memory.reclaim(9, RUNNING, "a") == 0
    assert engine.controller.memory.reclaim(3, STALLED, "a") == 3
    assert pinned(engine) == {"A": 1}
    assert engine.controller.memory.reclaim(9, STALLED, "a") == 1
    assert pinned(engine) == {}
    assert engine.rekeyed == ["a"]  # nothing to claim any more
    engine.check()


def test_a_stalled_request_takes_of_its_own_pin_only_what_others_lack():
    engine = make_engine()
    context = pin_blocks(engine, "A", 4)
    pin_blocks(engine, "B", 4)
    engine.arrive("a", [*context, 1], program="A")
    assert engine.controller.memory.reclaim(6, STALLED, "a") == 6
    assert pinned(engine) == {"A": 2}
    engine.check()


def test_blocks_that_two_pins_share_are_freed_when_both_gave_way():
    engine = make_engine()
    context = pin_blocks(engine, "A", 4)
    engine.turn("b-1", [*context[:4], 50, 51], [7], program="B")
    engine.arrive("r", [1], program="R")
    assert pinned(engine) == {"A": 4, "B": 6}
    assert engine.holder.pressure().pinned_blocks == 6
    assert engine.controller.memory.reclaim(3, RUNNING, "r") == 3
    assert pinned(engine) == {"A": 3, "B": 3}
    engine.check()


def test_nothing_freed_means_nothing_left():
    # Scenario:
    #   1. Program A is pinned: blocks 0 to 7.
    #   2. Somebody else, a copy under way, references the tail, blocks 4 to 7.
    #   3. Two blocks are wanted. The first ones dropped do not become free.
    #   4. The pin gives way further: 0 would mean that asking again is pointless.
    engine = make_engine(pool_blocks=9)
    pin_blocks(engine, "A", 8)
    tail = engine.holder.held[pin_of(engine, "A").pin_id][4:]
    engine.holder.take(tail)
    assert engine.controller.memory.reclaim(2, STALLED, "r") == 2
    assert pinned(engine) == {"A": 2}
    assert engine.controller.memory.reclaim(9, STALLED, "r") == 2
    assert engine.controller.memory.reclaim(9, STALLED, "r") == 0
    assert engine.holder.drop(tail) == 4
    assert engine.holder.free_blocks == 9


def test_what_a_first_round_freed_is_not_asked_for_again():
    engine = make_engine()
    pin_blocks(engine, "A", 8)
    copied = engine.holder.held[pin_of(engine, "A").pin_id][6:7]
    engine.holder.take(copied)
    # Of the last two one is free; the block before them makes up for the other.
    assert engine.controller.memory.reclaim(2, RUNNING, "r") == 2
    assert pinned(engine) == {"A": 5}


def test_a_holder_that_cannot_shorten_a_pin_gives_it_whole():
    engine = make_engine(whole_pins=True)
    pin_blocks(engine, "A", 4)
    assert engine.controller.memory.reclaim(1, RUNNING, "r") == 4
    assert pinned(engine) == {}
    assert victims(engine) == 1
    engine.check()


@pytest.mark.parametrize("whole_pins", [False, True])
def test_room_in_the_cap_is_made_only_where_it_is_of_use(whole_pins):
    config = {"policy": "fixed", "policy_options": {"ttl_s": 60.0}}
    config["max_pinned_fraction"] = 0.7
    engine = FakeEngine(config, pool_blocks=40, block_tokens=1, whole_pins=whole_pins)
    pin_blocks(engine, "A", 22)
    engine.arrive("b", list(range(50, 60)), program="B")
    engine.admit("b")
    pin_blocks(engine, "C", 1)
    engine.decode("b", [7])
    engine.finish("b")
    # The cap is 28, and C's one block is all that B's ten may take.
    assert pinned(engine) == ({"A": 22, "C": 1} if whole_pins else {"A": 22, "B": 6})
    engine.check()


@pytest.mark.parametrize("urgency", [RUNNING, STALLED])
def test_more_than_there_is_frees_all_there_is(urgency):
    engine = make_engine()
    for label in "AB":
        pin_blocks(engine, label, 4)
    assert engine.controller.memory.reclaim(1000, urgency, "r") == 8
    assert engine.controller.memory.reclaim(1000, urgency, "r") == 0
    assert engine.holder.free_blocks == 32


def test_no_wedge_a_stalled_request_gets_in_over_any_pins():
    engine = make_engine(pool_blocks=8)
    context = pin_blocks(engine, "A", 3)
    pin_blocks(engine, "B", 4)
    engine.arrive("a", [*context, 1, 2, 3, 4], program="A")
    assert engine.admit("a")
    assert engine.controller.telemetry.metrics.totals["claimed_tokens", ""] == 3
    engine.check()


def test_a_waiting_request_that_may_take_nothing_waits():
    engine = make_engine(pool_blocks=8)
    pin_blocks(engine, "A", 4)
    engine.arrive("b", [1, 2, 3], program="B")
    assert engine.admit("b")
    engine.arrive("c", [4, 5], program="C")
    assert not engine.admit("c")
    assert pinned(engine) == {"A": 4}
    engine.finish("b")
    assert engine.admit("c")
    assert engine.decode("c", [])
    engine.check()


# --- tenants ---------------------------------------------------------------------


def flooded():
    """Tenant "flood" came first and holds 24 of 40 blocks, A of nobody holds 4."""
    engine = make_engine(pool_blocks=40)
    for label in "FGH":
        prompt = [1000 * ord(label) + i for i in range(8)]
        engine.turn(f"{label}-1", prompt, [7], program=label, tenant="flood")
    pin_blocks(engine, "A", 4)
    return engine


def test_who_runs_takes_from_a_flood_first_and_no_more_than_it_needs():
    engine = flooded()
    engine.arrive("r", [1], program="R")
    assert engine.controller.memory.reclaim(2, RUNNING, "r") == 2
    assert pinned(engine) == {"F": 8, "G": 8, "H": 6, "A": 4}
    # H's six bring the flood below its half, three are still wanted.
    assert engine.controller.memory.reclaim(9, RUNNING, "r") == 9
    assert pinned(engine) == {"F": 8, "G": 8, "A": 1}
    engine.check()


def test_who_waits_takes_what_a_flood_holds_beyond_its_share_though_it_came_later():
    engine = flooded()
    engine.arrive("b", [1], program="B")
    assert engine.controller.memory.reclaim(3, WAITING, "b") == 3
    assert pinned(engine) == {"F": 8, "G": 8, "H": 5, "A": 4}
    assert engine.controller.memory.reclaim(1, WAITING, "b") == 1
    assert engine.controller.memory.reclaim(1, WAITING, "b") == 0  # 20 are its half
    engine.check()
