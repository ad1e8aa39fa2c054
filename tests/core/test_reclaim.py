"""Which pins give way. Programs are numbered by arrival: A before B before C."""

import pytest

from tests.core.stories import token_engine
from ttlcache.retention import decisions
from ttlcache.types import PinOutcome, ReleaseMode, Urgency

WAITING, RUNNING, STALLED = Urgency.WAITING, Urgency.RUNNING, Urgency.STALLED


@pytest.fixture
def engine():
    return token_engine()


def pin_blocks(engine, labels, count, first_token=None, **more):
    """Programs of their own with `count` pinned blocks each; the last one's context."""
    for label in labels:
        start = first_token if first_token is not None else 1000 * ord(label)
        prompt = list(range(start, start + count))
        context = engine.turn(f"{label}-1", prompt, [7], program=label, **more)
    return context


def held_by(engine, label):
    """Block ids."""
    pin_ids = {p.program.program_id: p.pin_id for p in engine.controller.pins}
    return engine.holder.blocks_by_pin[pin_ids[label]]


def test_the_latest_program_goes_first_tail_first_and_no_more_than_needed(engine):
    pin_blocks(engine, "ABC", 4)
    before = list(held_by(engine, "C"))
    assert engine.reclaim(2, RUNNING, "r") == 2
    assert engine.pinned() == {"A": 4, "B": 4, "C": 2}
    assert held_by(engine, "C") == before[:2]
    assert engine.reclaim(3, RUNNING, "r") == 3
    assert engine.pinned() == {"A": 4, "B": 3}
    assert engine.total("pins", PinOutcome.VICTIM) == 1
    # Asking for nothing asks for one block.
    assert engine.reclaim(0, RUNNING, "r") == 1
    assert engine.pinned() == {"A": 4, "B": 2}


@pytest.mark.parametrize("mode", [ReleaseMode.COPY_FIRST, ReleaseMode.FREE_NOW])
def test_the_holder_is_told_how_blocks_are_released(engine, mode):
    pin_blocks(engine, "ABC", 4)
    asked = []
    release, shrink = engine.holder.release, engine.holder.shrink
    engine.holder.release = lambda *args: asked.append(args[1:]) or release(*args)
    engine.holder.shrink = lambda *args: asked.append(args[1:]) or shrink(*args)
    engine.reclaim(6, RUNNING, "unknown", mode=mode)
    assert asked == [(PinOutcome.VICTIM, mode), (2, mode)]
    asked.clear()
    engine.end("A")
    assert asked == [(PinOutcome.ENDED, ReleaseMode.KEEP_CACHED)]


def test_a_waiting_request_takes_from_younger_programs_only(engine):
    pin_blocks(engine, "A", 4)
    engine.arrive("b", [1], program="B")
    pin_blocks(engine, "C", 4)
    assert engine.reclaim(3, WAITING, "b") == 3
    assert engine.pinned() == {"A": 4, "C": 1}
    # One block of C is all that B may have: taking it would be waste.
    assert engine.reclaim(2, WAITING, "b") == 0
    assert engine.pinned() == {"A": 4, "C": 1}
    assert engine.reclaim(1, WAITING, "b") == 1
    assert engine.pinned() == {"A": 4}
    assert engine.reclaim(1, WAITING, "b") == 0
    # A request that never arrived waits behind all programs.
    assert engine.reclaim(1, WAITING, "unknown") == 0
    assert engine.reclaim(9, STALLED, "unknown") == 4


def test_a_refusal_is_not_remembered_when_a_policy_deadline_is_lowered(engine):
    pin_blocks(engine, "A", 4)
    engine.arrive("b", [1], program="B")
    assert engine.reclaim(1, WAITING, "b") == 0
    (pin,) = engine.pins()
    engine.controller.pins.lower_policy_deadline(pin, engine.clock.now_s())
    assert engine.reclaim(1, WAITING, "b") == 1
    engine.controller.pins.lower_policy_deadline(pin, engine.clock.now_s() + 1.0)
    assert pin.policy_deadline_s == engine.clock.now_s()  # it is never raised


def test_what_pins_share_is_offered_once(engine):
    engine.arrive("b", [1], program="B")
    pin_blocks(engine, "CDE", 4, first_token=9000)
    assert engine.pinned() == {"C": 4, "D": 4, "E": 4}
    # Three blocks are common, the last one was computed for each of them.
    assert engine.reclaim(7, WAITING, "b") == 0
    assert engine.pinned() == {"C": 4, "D": 4, "E": 4}
    assert engine.reclaim(6, WAITING, "b") == 6
    assert engine.pinned() == {}


def test_a_waiting_request_leaves_pins_alone_that_are_about_to_pay_off(engine):
    engine.arrive("a", [1], program="A")
    engine.arrive("b", pin_blocks(engine, "B", 4), program="B")
    assert engine.reclaim(1, WAITING, "a") == 0
    assert engine.reclaim(1, RUNNING, "a") == 1


@pytest.mark.parametrize(
    ("tier", "tenant", "freed"), [(None, "", 0), ("cpu", "other", 0), ("cpu", "", 4)]
)
def test_above_a_tier_that_keeps_them_pins_yield_to_waiting_requests_of_their_tenant(
    tier, tenant, freed
):
    engine = token_engine(policy="adaptive")
    engine.controller.tier_knowledge.on_reload_source(tier)
    pin_blocks(engine, "A", 4)
    engine.arrive("b", [1], program="B", tenant=tenant)
    # As a whole: what is left of a context is of little use.
    assert engine.reclaim(2, WAITING, "b") == freed


def test_an_overdue_request_takes_any_pin_but_its_own(engine):
    engine.arrive("b", pin_blocks(engine, "B", 4), program="B")
    assert engine.reclaim(1, Urgency.WAITING_ANY_PIN, "b") == 0
    pin_blocks(engine, "C", 4)
    assert engine.reclaim(1, Urgency.WAITING_ANY_PIN, "b") == 1
    assert engine.pinned() == {"B": 4, "C": 3}


def test_a_claim_takes_from_pins_whose_turns_stand_behind_it(engine):
    older, younger = pin_blocks(engine, "A", 4), pin_blocks(engine, "B", 4)
    engine.arrive("b", [*younger, 1], program="B")
    engine.arrive("a", [*older, 1], program="A")
    assert engine.reclaim(1, WAITING, "b") == 0
    assert engine.reclaim(1, WAITING, "a") == 1
    assert engine.pinned() == {"A": 4, "B": 3}


def test_the_own_pin_goes_only_when_the_engine_is_stalled(engine):
    context = pin_blocks(engine, "A", 4)
    pin_blocks(engine, "B", 4)
    engine.arrive("a", [*context, 1], program="A")
    assert engine.reclaim(9, RUNNING, "a") == 4
    assert engine.pinned() == {"A": 4}
    assert engine.reclaim(9, RUNNING, "a") == 0
    pin_blocks(engine, "C", 4)
    assert engine.reclaim(6, STALLED, "a") == 6  # of its own what others lack
    assert engine.pinned() == {"A": 2}
    assert engine.reclaim(9, STALLED, "a") == 2
    assert engine.pinned() == {}
    assert engine.rekeyed == ["a"]  # nothing to claim any more


def test_blocks_that_two_pins_share_are_freed_when_both_gave_way(engine):
    context = pin_blocks(engine, "A", 4)
    engine.turn("b-1", [*context[:4], 50, 51], [7], program="B")
    assert engine.pinned() == {"A": 4, "B": 6}
    assert engine.holder.pressure().pinned_blocks == 6
    assert engine.reclaim(3, RUNNING, "r") == 3
    assert engine.pinned() == {"A": 3, "B": 3}
    assert engine.reclaim(2, RUNNING, "r") == 2, "they end alike"
    assert engine.pinned() == {"A": 1, "B": 1}


def test_nothing_freed_means_nothing_left():
    # Scenario:
    #   1. Program A is pinned: blocks 0 to 7.
    #   2. Somebody else, a copy under way, references the tail, blocks 4 to 7.
    #   3. Two blocks are wanted. The first ones dropped do not become free.
    #   4. The pin gives way further: 0 would mean that asking again is pointless.
    engine = token_engine(pool_blocks=9)
    pin_blocks(engine, "A", 8)
    tail = held_by(engine, "A")[4:]
    engine.holder.take(tail)
    reclaim = engine.controller.memory.reclaim
    assert reclaim(2, STALLED, "r") == 2
    assert engine.pinned() == {"A": 2}
    assert reclaim(9, STALLED, "r") == 2
    assert reclaim(9, STALLED, "r") == 0
    assert engine.holder.drop(tail) == 4
    assert engine.holder.free_blocks == 9


def test_what_a_first_round_freed_is_not_asked_for_again(engine):
    pin_blocks(engine, "A", 8)
    engine.holder.take(held_by(engine, "A")[6:7])  # as a copy under way does
    # Of the last two one is free; the block before them makes up for the other.
    assert engine.controller.memory.reclaim(2, RUNNING, "r") == 2
    assert engine.pinned() == {"A": 5}


def test_a_holder_that_cannot_shorten_a_pin_gives_it_whole():
    engine = token_engine(whole_pins=True)
    pin_blocks(engine, "A", 4)
    assert engine.reclaim(1, RUNNING, "r") == 4
    assert engine.pinned() == {}
    assert engine.total("pins", PinOutcome.VICTIM) == 1


@pytest.mark.parametrize("whole_pins", [False, True])
def test_room_in_the_cap_is_made_only_where_it_is_of_use(whole_pins):
    sizes = {"pool_blocks": 40, "max_pinned_fraction": 0.7}
    engine = token_engine(**sizes, whole_pins=whole_pins)
    pin_blocks(engine, "A", 22)
    engine.arrive("b", list(range(50, 60)), program="B")
    engine.admit("b")
    assert engine.decode("b", [])
    pin_blocks(engine, "C", 1)
    engine.decode("b", [7])
    engine.finish("b")
    # The cap is 28, and C's one block is all that B's ten may take.
    assert engine.pinned() == ({"A": 22, "C": 1} if whole_pins else {"A": 22, "B": 6})


# --- tenants ---------------------------------------------------------------------


@pytest.fixture
def flooded():
    """Tenant "flood" came first and holds 24 of 40 blocks, A of nobody holds 4."""
    engine = token_engine(pool_blocks=40)
    pin_blocks(engine, "FGH", 8, tenant="flood")
    pin_blocks(engine, "A", 4)
    return engine


def test_who_runs_takes_from_a_flood_first_and_no_more_than_it_needs(flooded):
    flooded.arrive("r", [1], program="R")
    assert flooded.reclaim(2, RUNNING, "r") == 2
    assert flooded.pinned() == {"F": 8, "G": 8, "H": 6, "A": 4}
    # H's six bring the flood below its half, three are still wanted.
    assert flooded.reclaim(9, RUNNING, "r") == 9
    assert flooded.pinned() == {"F": 8, "G": 8, "A": 1}


def test_who_waits_takes_what_a_flood_holds_beyond_its_share_though_it_came_later(
    flooded,
):
    flooded.arrive("b", [1], program="B")
    assert flooded.reclaim(3, WAITING, "b") == 3
    assert flooded.pinned() == {"F": 8, "G": 8, "H": 5, "A": 4}
    assert flooded.reclaim(1, WAITING, "b") == 1
    assert flooded.reclaim(1, WAITING, "b") == 0  # 20 are its half


def test_contexts_that_begin_alike_give_way_from_the_longest():
    engine = token_engine()
    shrunk = []
    shrink = engine.holder.shrink
    engine.holder.shrink = lambda *args: shrunk.append(args[0]) or shrink(*args)
    for label, count in zip("ABCDEFGH", (3, 6, 9, 12, 11, 8, 5, 12), strict=True):
        pin_blocks(engine, label, count, first_token=0)
    assert sorted(engine.pinned().values()) == [3, 5, 6, 8, 9, 11, 12, 12]
    assert engine.reclaim(1, RUNNING, "r") == 1
    assert len(shrunk) == 1
    assert sorted(engine.pinned().values()) == [3, 5, 6, 8, 9, 11, 11, 12]
    assert engine.reclaim(9, RUNNING, "r") == 9
    assert max(engine.pinned().values()) <= 6


def test_a_flood_of_pins_on_shared_blocks_takes_none_from_another_tenant(monkeypatch):
    monkeypatch.setattr(decisions, "MAX_SHARING", 2)
    engine = token_engine(pool_blocks=40)
    for label in "ABCDEFGH":
        pin_blocks(engine, label, 10, first_token=0, tenant="flood")
    assert sum(engine.pinned().values()) == 80
    pin_blocks(engine, "Z", 10, tenant="other")
    assert engine.pinned()["Z"] == 10
    assert sum(engine.pinned().values()) <= 80
