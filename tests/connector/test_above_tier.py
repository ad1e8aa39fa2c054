"""Ended turns above a lower tier, block by block, on a pool of nothing but counts."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest

from tests.connector.fake_tier import FakeTier
from ttlcache.clock import VirtualClock
from ttlcache.programs.fair_queueing import Place
from ttlcache.programs.model import Program, Turn
from ttlcache.retention.pin_table import PinTable
from ttlcache.types import GapKey, PinOutcome, ReleaseMode
from ttlcache_connector.blocks.pins_above_tier import PinsAboveTier
from ttlcache_connector.blocks.unpinned_turns import COPY_WAIT_S, UnpinnedTurns

KEEP_CACHED = ReleaseMode.KEEP_CACHED
COPY_FIRST = ReleaseMode.COPY_FIRST
FREE_NOW = ReleaseMode.FREE_NOW
BLOCKS = 40


class Pool:
    """Of vLLM's block pool what a holder uses; block 0 is the null block."""

    def __init__(self) -> None:
        self.num_gpu_blocks = BLOCKS + 1
        self.blocks = [
            SimpleNamespace(block_id=i, ref_cnt=0, block_hash=i, is_null=not i)
            for i in range(self.num_gpu_blocks)
        ]

    def get_new_blocks(self, num_blocks):
        raise AssertionError("a holder takes no blocks")

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
    """A holder, and pins of turns that finished."""

    def __init__(self, *, copies_at_once=True):
        self.pool, self.tier, self.clock = Pool(), FakeTier(), VirtualClock()
        self.pins = PinTable()
        self.counted = Counter()
        self.unpinned = UnpinnedTurns(
            self.pool,
            self.tier,
            self.clock,
            self.count,
            copies_at_once=copies_at_once,
        )
        self.holder = PinsAboveTier(
            self.pool,
            [16],
            lambda: (0, 0),
            self.unpinned,
            self.tier,
            self.tier.report_turn,
        )

    def count(self, name, label):
        self.counted[name, label] += 1

    def blocks(self, start, count):
        return self.pool.blocks[start : start + count]

    def pin(self, request_id="a", start=1, count=20):
        program = Program(("", request_id), place=Place(start))
        turn = Turn(start, 0.0, GapKey("bash"), context_tokens=16 * count)
        pin = self.pins.add(
            program, turn, kv_blocks=count, kv_tokens=16 * count, now_s=0.0, ttl_s=1.0
        )
        self.holder.hold(pin.pin_id, self.blocks(start, count))
        self.holder.on_pinned(pin.pin_id, request_id, program)
        return pin

    def shrink(self, pin, count, mode=COPY_FIRST):
        return self.holder.shrink(pin.pin_id, count, mode)

    def end(self, pin, outcome=PinOutcome.EXPIRED, mode=KEEP_CACHED):
        return self.holder.release(pin.pin_id, outcome, mode)

    def expire(self, request_id="a", start=1, count=20):
        self.end(self.pin(request_id, start, count))

    def expire_several(self, number, count):
        """Turns "r0", "r1", … of so many blocks each."""
        for index in range(number):
            self.expire(f"r{index}", 1 + count * index, count)

    def copy(self, request_id="a"):
        """The copy begins, and the tier has references of its own."""
        self.tier.copy(request_id)
        for releasable in self.tier.take_events().releasable:
            self.unpinned.on_releasable(releasable)

    @property
    def held(self):
        """Blocks that are cached, and that wait for their copy."""
        return self.unpinned.lingering_blocks, self.unpinned.awaiting_copy_blocks

    @property
    def free(self):
        return self.pool.get_num_free_blocks()


@pytest.fixture
def rig():
    return Rig()


@pytest.fixture
def cached():
    return Rig(copies_at_once=False)


def test_a_claim_lets_go_of_the_tail_that_was_to_be_copied(rig):
    pin = rig.pin()
    rig.shrink(pin, 8)
    assert rig.held == (0, 8)
    rig.end(pin, PinOutcome.CLAIMED)
    assert rig.tier.of("drop") == ["a"]
    assert rig.held == (0, 0)
    assert rig.free == BLOCKS


def test_who_runs_takes_what_waits_for_its_copy_oldest_first(rig):
    rig.expire_several(3, 10)
    assert rig.free == 10
    assert rig.unpinned.free(11, at_once=False) == 0, "a copy takes moments"
    assert rig.unpinned.free(11, at_once=True) == 20
    assert rig.counted["demotions", "dropped"] == 2
    assert (rig.free, rig.unpinned.awaiting_copy_blocks) == (30, 10)
    rig.clock.advance(COPY_WAIT_S)
    assert rig.unpinned.soon_free() == 0, "nobody waits for that copy any longer"
    assert rig.unpinned.free(1, at_once=False) == 10


@pytest.mark.parametrize("urgent", [True, False])
def test_what_is_taken_at_once_may_still_be_copied(cached, urgent):
    """Until somebody overwrites it."""
    if urgent:
        assert cached.end(cached.pin(), PinOutcome.VICTIM, FREE_NOW) == 20
    else:
        cached.expire()
        assert cached.tier.of("demote") == []
        assert cached.unpinned.free(1, at_once=True) == 20
    assert cached.tier.of("demote") == ["a"]
    assert cached.free == BLOCKS


def test_what_a_copy_reads_is_free_soon_unless_somebody_uses_it(rig):
    rig.expire()
    assert rig.unpinned.soon_free() == 20
    rig.pool.touch(rig.blocks(1, 20))  # by the tier
    rig.tier.references = lambda: dict.fromkeys(range(1, 21), 1)
    rig.copy()
    assert rig.free == BLOCKS - 20
    assert rig.unpinned.soon_free() == 20
    rig.pool.touch(rig.blocks(1, 4))  # by a request
    assert rig.unpinned.soon_free() == 16


def test_an_id_that_is_used_again_leaves_nothing_behind(cached):
    cached.expire("a", 1, 10)
    cached.expire("a", 11, 10)
    assert cached.unpinned.lingering_blocks == 10
    assert cached.free == BLOCKS - 10
    assert cached.holder.pressure().free_blocks == BLOCKS


@pytest.mark.parametrize(
    ("drop", "mode", "is_stored", "copied"),
    [
        (8, COPY_FIRST, False, 8),
        (4, COPY_FIRST, False, 4),
        (3, COPY_FIRST, False, 0),  # it is recomputed rather than copied
        (8, KEEP_CACHED, False, 0),  # a rewritten history: nobody finds it again
        (8, FREE_NOW, False, 0),  # memory that a running request needs
        (15, COPY_FIRST, True, 0),
    ],
)
def test_a_tail_waits_for_its_copy_or_is_let_go(rig, drop, mode, is_stored, copied):
    pin, left = rig.pin(), 20 - drop
    if is_stored:
        rig.tier.releasable.add("a")
    assert rig.shrink(pin, drop, mode) == (drop, left, 16 * left)
    assert rig.held == (0, copied)
    assert rig.tier.due == (["a"] if copied else [])
    if copied:
        rig.copy()
    assert rig.free == BLOCKS - left


def test_a_pin_that_only_gives_way_to_another_stays_cached(cached):
    """Under the cap: nobody needs its memory."""
    assert cached.end(cached.pin(), PinOutcome.VICTIM) == 0
    assert cached.held == (20, 0)
    assert cached.holder.pressure().free_blocks == BLOCKS
    assert cached.tier.due == []


def test_blocks_that_others_use_do_not_count_as_given(rig):
    """Three of its last blocks are somebody's running prompt."""
    pin = rig.pin()
    rig.pool.touch(rig.blocks(18, 3))
    assert rig.end(pin, PinOutcome.VICTIM, COPY_FIRST) == 17


@pytest.mark.parametrize(
    ("found", "held", "dropped"), [(14, (14, 6), []), (20, (0, 0), ["a"])]
)
def test_who_found_a_beginning_leaves_the_tail_its_copy(cached, found, held, dropped):
    """Another branch of the same program."""
    pin = cached.pin()
    cached.shrink(pin, 6)
    cached.end(pin)
    assert cached.held == (14, 6)
    cached.pool.touch(cached.blocks(1, found))
    cached.unpinned.on_program_resumed(pin.program)
    assert cached.held == held
    assert cached.tier.of("drop") == dropped
