"""Ended turns above a lower tier, block by block, on a pool of nothing but counts."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from tests.connector.fake_tier import FakeTier
from ttlcache.clock import VirtualClock
from ttlcache.events import Shrunk
from ttlcache.pins import PinTable
from ttlcache.programs import Program, Turn
from ttlcache.types import GapKey, PinOutcome
from ttlcache_connector import demotion
from ttlcache_connector.demotion import DemotingLedger

BLOCKS = 40
WAIT_S = 0.5


class Pool:
    """Of vLLM's block pool what a ledger uses; block 0 is the null block."""

    def __init__(self) -> None:
        self.num_gpu_blocks = BLOCKS + 1
        self.blocks = [
            SimpleNamespace(block_id=i, ref_cnt=0, block_hash=i, is_null=not i)
            for i in range(self.num_gpu_blocks)
        ]

    def touch(self, blocks):
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, blocks):
        for block in blocks:
            block.ref_cnt -= 1
            assert block.ref_cnt >= 0

    def get_num_free_blocks(self):
        return sum(not b.ref_cnt for b in self.blocks[1:])


class Rig:
    """A ledger, and pins of turns that finished."""

    def __init__(self, room_blocks=0):
        self.pool, self.tier, self.clock = Pool(), FakeTier(), VirtualClock()
        self.dropped = []
        self.tier.on_demotion = self.dropped.append
        self.pins = PinTable()
        self.ledger = DemotingLedger(
            self.pool,
            [16],
            lambda: (0, 0),
            tier=self.tier,
            clock=self.clock,
            wait_s=WAIT_S,
            room_blocks=room_blocks,
        )

    def blocks(self, start, count):
        return self.pool.blocks[start : start + count]

    def pin(self, request_id, start, count):
        program = Program(("", request_id), arrival_seq=start)
        turn = Turn(start, 0.0, GapKey("bash"), context_tokens=16 * count)
        pin = self.pins.add(
            program, turn, kv_blocks=count, kv_tokens=16 * count, now_s=0.0, ttl_s=1.0
        )
        self.ledger.hold(pin.pin_id, self.blocks(start, count))
        self.ledger.is_turn_of(pin.pin_id, request_id, program)
        return pin

    def end(self, pin, outcome=PinOutcome.EXPIRED):
        self.ledger.pin_ends(pin, outcome)
        return self.ledger.release(pin.pin_id)

    def expire(self, request_id, start, count):
        self.end(self.pin(request_id, start, count))

    @property
    def free(self):
        return self.pool.get_num_free_blocks()


@pytest.fixture
def rig():
    return Rig()


@pytest.fixture
def lingering():
    return Rig(room_blocks=5)


def test_a_claim_lets_go_of_the_tail_that_was_to_be_copied(rig):
    pin = rig.pin("a", 1, 20)
    with rig.ledger.copying_first():
        rig.ledger.shrink(pin.pin_id, 8)
    assert rig.ledger.demoting_blocks == 8
    rig.end(pin, PinOutcome.CLAIMED)
    assert rig.tier.of("forget") == ["a"]
    assert rig.ledger.demoting_blocks == 0
    assert rig.free == BLOCKS


def test_all_that_a_turn_gave_up_waits_for_its_copy(rig):
    pin = rig.pin("a", 1, 20)
    with rig.ledger.copying_first():
        rig.ledger.shrink(pin.pin_id, 8)
        rig.ledger.shrink(pin.pin_id, 4)
        rig.end(pin, PinOutcome.VICTIM)
    assert rig.ledger.demoting_blocks == 20
    rig.tier.copy("a")
    assert rig.free == BLOCKS


def test_who_runs_takes_what_waits_for_its_copy_oldest_first(rig):
    for number in range(3):
        rig.expire(f"r{number}", 1 + 10 * number, 10)
    assert rig.free == 10
    assert rig.ledger.relieve(11, at_once=False) == 0, "a copy is a matter of moments"
    assert rig.ledger.relieve(11, at_once=True) == 20
    assert rig.dropped == ["dropped", "dropped"]
    assert (rig.free, rig.ledger.demoting_blocks) == (30, 10)
    rig.clock.advance(WAIT_S)
    assert rig.ledger.soon_free() == 0, "nobody waits for that copy any longer"
    assert rig.ledger.relieve(1, at_once=False) == 10


@pytest.mark.parametrize("urgent", [True, False])
def test_what_is_taken_at_once_may_still_be_copied(lingering, urgent):
    """Until somebody overwrites it."""
    if urgent:
        pin = lingering.pin("a", 1, 20)
        assert lingering.end(pin, PinOutcome.VICTIM) == 20
    else:
        lingering.expire("a", 1, 20)
        assert lingering.tier.of("demote") == []
        assert lingering.ledger.relieve(1, at_once=True) == 20
    assert lingering.tier.of("demote") == ["a"]
    assert lingering.free == BLOCKS


def test_what_a_copy_reads_is_free_soon_unless_somebody_uses_it(rig):
    rig.expire("a", 1, 20)
    assert rig.ledger.soon_free() == 20
    below = rig.blocks(1, 20)
    rig.pool.touch(below)  # by the tier
    rig.tier.references = lambda: dict.fromkeys(range(1, 21), 1)
    rig.tier.copy("a")
    assert rig.free == BLOCKS - 20
    assert rig.ledger.soon_free() == 20
    rig.pool.touch(rig.blocks(1, 4))  # by a request
    assert rig.ledger.soon_free() == 16


def test_what_runs_is_not_copied_to_make_room(lingering):
    lingering.expire("in-use", 1, 10)
    lingering.expire("alone", 11, 10)
    lingering.pool.touch(lingering.blocks(1, 10))
    assert lingering.ledger.relieve(5, at_once=False) == 0
    assert lingering.tier.of("demote") == ["alone"]
    assert lingering.ledger.lingering_blocks == 10


def test_room_is_made_once(lingering):
    for number in range(3):
        lingering.expire(f"r{number}", 1 + 12 * number, 12)
    for _ in range(3):
        lingering.ledger.keep_room()  # 4 are free, 5 are wanted
    assert lingering.tier.of("demote") == ["r0"]


def test_an_id_that_is_used_again_leaves_nothing_behind(lingering):
    lingering.expire("a", 1, 10)
    lingering.expire("a", 11, 10)
    assert lingering.ledger.lingering_blocks == 10
    assert lingering.free == BLOCKS - 10
    assert lingering.ledger.pressure().free_blocks == BLOCKS


def pin_with_rest(rig, pinned=20, rest=10):
    """A turn of which only the first blocks found room in a pin."""
    pin = rig.pin("a", 1, pinned)
    whole = rig.blocks(1, pinned + rest)
    rig.pool.touch(whole)  # by the request
    rig.ledger.has_rest("a", pin.program, whole, pinned)
    rig.pool.free_blocks(whole)
    return pin


def test_what_a_pin_had_no_room_for_lingers_until_its_turn_is_claimed(lingering):
    pin = pin_with_rest(lingering)
    assert (lingering.free, lingering.ledger.lingering_blocks) == (BLOCKS - 30, 10)
    assert lingering.ledger.pressure().free_blocks == BLOCKS - 20
    lingering.ledger.keep_room()
    assert lingering.ledger.lingering_blocks == 10, "nobody needs its room"
    lingering.end(pin, PinOutcome.CLAIMED)
    assert lingering.tier.of("demote") == []
    assert lingering.free == BLOCKS
    assert lingering.ledger.references() == {}


@pytest.mark.parametrize("rest", [4, 10])
def test_the_rest_of_a_turn_is_copied_unless_it_is_little(lingering, rest):
    pin_with_rest(lingering, 20, rest)
    assert lingering.ledger.relieve(rest, at_once=False) == (rest if rest < 5 else 0)
    assert lingering.tier.of("demote") == (["a"] if rest > 5 else [])
    assert lingering.ledger.demoting_blocks == (rest if rest > 5 else 0)
    lingering.tier.copy("a")
    assert lingering.free == BLOCKS - 20


def test_who_runs_takes_the_rest_of_a_turn_for_nothing(lingering):
    pin_with_rest(lingering)
    assert lingering.ledger.relieve(1, at_once=True) == 10
    assert lingering.tier.of("demote") == [], "its pin may be claimed yet"
    assert lingering.free == BLOCKS - 20


def test_pin_and_rest_expire_as_one_turn(lingering):
    pin = pin_with_rest(lingering)
    lingering.end(pin)
    assert lingering.ledger.lingering_blocks == 30
    assert lingering.ledger.pressure().free_blocks == BLOCKS
    lingering.ledger.relieve(BLOCKS, at_once=False)
    assert lingering.tier.of("demote") == ["a"]
    assert lingering.ledger.demoting_blocks == 30
    lingering.tier.copy("a")
    assert lingering.free == BLOCKS


def test_a_victim_takes_its_rest_along(lingering):
    pin = pin_with_rest(lingering)
    with lingering.ledger.copying_first():
        assert lingering.end(pin, PinOutcome.VICTIM) == 30
    assert lingering.ledger.demoting_blocks == 30
    lingering.tier.copy("a")
    assert lingering.free == BLOCKS
    assert lingering.ledger.references() == {}


@pytest.mark.parametrize("why", ["below", "shared", "no linger"])
def test_a_rest_that_need_not_or_may_not_linger(lingering, why):
    rig = Rig() if why == "no linger" else lingering
    if why == "below":
        rig.tier.settled.add("a")
    if why == "shared":
        rig.expire("b", 21, 10)
    pin_with_rest(rig)
    assert rig.ledger.lingering_blocks == (10 if why == "shared" else 0)
    assert rig.free == BLOCKS - 20 - (10 if why == "shared" else 0)
    assert rig.tier.of("demote") == []


def next_turn(rig, before, request_id, start, count):
    """A pin of the same program that goes on with blocks of the pin before."""
    turn = Turn(start, 0.0, GapKey("bash"), context_tokens=16 * count)
    pin = rig.pins.add(
        before.program, turn, kv_blocks=count, kv_tokens=16 * count, now_s=0.0, ttl_s=1
    )
    rig.ledger.hold(pin.pin_id, rig.blocks(start, count))
    rig.ledger.is_turn_of(pin.pin_id, request_id, before.program)
    return pin


def went_down(rig, request_id="a", start=1, count=10):
    pin = rig.pin(request_id, start, count)
    with rig.ledger.copying_first():
        rig.end(pin, PinOutcome.VICTIM)
    rig.tier.copy(request_id)
    return pin


def test_whose_kv_is_below_gives_way_first(rig):
    below = next_turn(rig, went_down(rig), "a2", 1, 12)
    fresh = rig.pin("b", 20, 12)
    done = rig.pin("c", 33, 4)
    rig.tier.settled.add("c")  # nothing of it is owed
    pins = [fresh, below, done]
    assert list(rig.ledger.cheapest_first(pins)) == [done, below, fresh]
    done.holders.add("next turn")
    assert list(rig.ledger.cheapest_first(pins)) == [below, fresh, done]


@pytest.mark.parametrize("change", ["another hash", "shorter", "several groups"])
def test_what_cannot_be_known_to_be_below_is_not(rig, change):
    below = next_turn(rig, went_down(rig), "a2", 1, 9 if change == "shorter" else 12)
    fresh = rig.pin("b", 20, 12)
    if change == "another hash":
        rig.pool.blocks[10].block_hash = "of another context"
    if change == "several groups":
        rig.ledger._group_block_tokens = (16, 16)
    assert list(rig.ledger.cheapest_first([fresh, below])) == [fresh, below]


def test_pins_that_cost_alike_stay_in_their_order(rig):
    pins = [rig.pin(name, start, 5) for start, name in ((1, "a"), (6, "b"), (11, "c"))]
    assert list(rig.ledger.cheapest_first(iter(pins))) == pins


@pytest.mark.parametrize("drop", [1, 2])
def test_a_tail_is_copied_where_hardly_more_is_owed(rig, drop):
    """Two of twelve blocks are not below: one copied for each one saved."""
    pin = next_turn(rig, went_down(rig), "a2", 1, 12)
    with rig.ledger.copying_first():
        assert rig.ledger.shrink(pin.pin_id, drop) == Shrunk(
            drop, 12 - drop, (12 - drop) * 16
        )
    assert rig.tier.of("demote") == ["a", "a2"]
    assert rig.ledger.demoting_blocks == drop


def test_it_is_not_remembered_of_everybody_for_ever(rig, monkeypatch):
    monkeypatch.setattr(demotion, "MAX_BELOW", 2)
    for number in range(4):
        went_down(rig, f"r{number}", 1 + 5 * number, 5)
    assert len(rig.ledger._below) == 2


@pytest.mark.parametrize("how", ["release_demoting", "drop_all"])
@pytest.mark.parametrize("room_blocks", [0, 5])
def test_nothing_stays_after_a_reset(how, room_blocks):
    rig = Rig(room_blocks)
    for number in range(2):
        rig.expire(f"r{number}", 1 + 10 * number, 10)
    getattr(rig.ledger, how)()
    assert rig.tier.of("forget") == ["r0", "r1"]
    assert rig.free == BLOCKS
    assert rig.ledger.references() == {}
    assert rig.ledger.relieve(math.inf, at_once=True) == 0
