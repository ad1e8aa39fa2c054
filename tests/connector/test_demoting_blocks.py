"""Ended turns above a lower tier, block by block, on a pool of nothing but counts."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from tests.connector.fake_tier import FakeTier
from ttlcache.clock import VirtualClock
from ttlcache.programs.model import Program, Turn
from ttlcache.programs.places import Place
from ttlcache.retention.pins import PinTable
from ttlcache.types import GapKey, PinOutcome, ReleaseMode
from ttlcache_connector.blocks import demoting
from ttlcache_connector.blocks.demoting import LEAST_PIECE, DemotingBlocks
from ttlcache_connector.blocks.pending_copies import COPY_WAIT_S

KEEP_CACHED = ReleaseMode.KEEP_CACHED
COPY_FIRST = ReleaseMode.COPY_FIRST
FREE_NOW = ReleaseMode.FREE_NOW
BLOCKS = 40
WAIT_S = COPY_WAIT_S


class Pool:
    """Of vLLM's block pool what a ledger uses; block 0 is the null block."""

    def __init__(self) -> None:
        self.num_gpu_blocks = BLOCKS + 1
        self.blocks = [
            SimpleNamespace(block_id=i, ref_cnt=0, block_hash=i, is_null=not i)
            for i in range(self.num_gpu_blocks)
        ]

    def get_new_blocks(self, num_blocks):
        raise AssertionError("a ledger takes no blocks")

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
        self.pins = PinTable()
        self.ledger = DemotingBlocks(
            self.pool,
            [16],
            lambda: (0, 0),
            report_turn=self.tier.report_turn,
            tier=self.tier,
            clock=self.clock,
            room_blocks=room_blocks,
        )

    def blocks(self, start, count):
        return self.pool.blocks[start : start + count]

    def pin(self, request_id, start, count):
        program = Program(("", request_id), place=Place(start))
        turn = Turn(start, 0.0, GapKey("bash"), context_tokens=16 * count)
        pin = self.pins.add(
            program, turn, kv_blocks=count, kv_tokens=16 * count, now_s=0.0, ttl_s=1.0
        )
        self.ledger.hold(pin.pin_id, self.blocks(start, count))
        self.ledger.bind_pin_to_request(pin.pin_id, request_id, program)
        return pin

    def end(self, pin, outcome=PinOutcome.EXPIRED, mode=KEEP_CACHED, needed=BLOCKS):
        return self.ledger.release(pin.pin_id, outcome, mode, needed)

    def expire(self, request_id, start, count):
        self.end(self.pin(request_id, start, count))

    def copy(self, request_id):
        """The copy begins, and the tier has references of its own."""
        self.tier.copy(request_id)
        for settled in self.tier.take_settled():
            self.ledger.on_settled(settled)

    @property
    def free(self):
        return self.pool.get_num_free_blocks()


@pytest.fixture
def rig():
    return Rig()


@pytest.fixture
def lingering():
    return Rig(room_blocks=5)


@pytest.fixture
def tails():
    """Above a tier that finds tails without what stands before them."""
    rig = Rig(room_blocks=5)
    rig.tier.stores_suffixes = True
    return rig


def test_a_claim_lets_go_of_the_tail_that_was_to_be_copied(rig):
    pin = rig.pin("a", 1, 20)
    rig.ledger.shrink(pin.pin_id, 8, COPY_FIRST)
    assert rig.ledger.demoting_blocks == 8
    rig.end(pin, PinOutcome.CLAIMED)
    assert rig.tier.of("drop") == ["a"]
    assert rig.ledger.demoting_blocks == 0
    assert rig.free == BLOCKS


def test_all_that_a_turn_gave_up_waits_for_its_copy(rig):
    pin = rig.pin("a", 1, 20)
    rig.ledger.shrink(pin.pin_id, 8, COPY_FIRST)
    rig.ledger.shrink(pin.pin_id, 4, COPY_FIRST)
    rig.end(pin, PinOutcome.VICTIM, COPY_FIRST)
    assert rig.ledger.demoting_blocks == 20
    rig.copy("a")
    assert rig.free == BLOCKS


def test_who_runs_takes_what_waits_for_its_copy_oldest_first(rig):
    for number in range(3):
        rig.expire(f"r{number}", 1 + 10 * number, 10)
    assert rig.free == 10
    assert rig.ledger.free_expired(11, at_once=False) == 0, "a copy takes moments"
    assert rig.ledger.free_expired(11, at_once=True) == 20
    assert rig.ledger.take_dropped_copies() == 2
    assert (rig.free, rig.ledger.demoting_blocks) == (30, 10)
    rig.clock.advance(WAIT_S)
    assert rig.ledger.soon_free() == 0, "nobody waits for that copy any longer"
    assert rig.ledger.free_expired(1, at_once=False) == 10


@pytest.mark.parametrize("urgent", [True, False])
def test_what_is_taken_at_once_may_still_be_copied(lingering, urgent):
    """Until somebody overwrites it."""
    if urgent:
        pin = lingering.pin("a", 1, 20)
        assert lingering.end(pin, PinOutcome.VICTIM, FREE_NOW) == 20
    else:
        lingering.expire("a", 1, 20)
        assert lingering.tier.of("demote") == []
        assert lingering.ledger.free_expired(1, at_once=True) == 20
    assert lingering.tier.of("demote") == ["a"]
    assert lingering.free == BLOCKS


def test_what_a_copy_reads_is_free_soon_unless_somebody_uses_it(rig):
    rig.expire("a", 1, 20)
    assert rig.ledger.soon_free() == 20
    below = rig.blocks(1, 20)
    rig.pool.touch(below)  # by the tier
    rig.tier.references = lambda: dict.fromkeys(range(1, 21), 1)
    rig.copy("a")
    assert rig.free == BLOCKS - 20
    assert rig.ledger.soon_free() == 20
    rig.pool.touch(rig.blocks(1, 4))  # by a request
    assert rig.ledger.soon_free() == 16


def test_what_runs_is_not_copied_to_make_room(lingering):
    lingering.expire("in-use", 1, 10)
    lingering.expire("alone", 11, 10)
    lingering.pool.touch(lingering.blocks(1, 10))
    assert lingering.ledger.free_expired(5, at_once=False) == 0
    assert lingering.tier.of("demote") == ["alone"]
    assert lingering.ledger.lingering_blocks == 10


def test_room_is_made_once(lingering):
    for number in range(3):
        lingering.expire(f"r{number}", 1 + 12 * number, 12)
    for _ in range(3):
        # 4 are free, 5 are wanted.
        lingering.ledger.start_copies_ahead(lambda: [1, 30, 17])
    assert lingering.tier.of("demote") == ["r0"]


def test_an_id_that_is_used_again_leaves_nothing_behind(lingering):
    lingering.expire("a", 1, 10)
    lingering.expire("a", 11, 10)
    assert lingering.ledger.lingering_blocks == 10
    assert lingering.free == BLOCKS - 10
    assert lingering.ledger.pressure().free_blocks == BLOCKS


@pytest.mark.parametrize("drop", [1, 8, 19])
def test_a_tail_goes_down_alone(tails, drop):
    pin = tails.pin("a", 1, 20)
    shrunk = tails.ledger.shrink(pin.pin_id, drop, COPY_FIRST)
    keep = 20 - drop
    assert shrunk == (drop, keep, 16 * keep)
    assert tails.tier.due == {"a": 16 * keep}
    assert tails.ledger.demoting_blocks == drop
    tails.copy("a")
    assert tails.free == BLOCKS - keep
    tails.end(pin, PinOutcome.VICTIM, COPY_FIRST)
    assert tails.tier.due == {"a": 0}
    assert tails.ledger.demoting_blocks == keep
    tails.copy("a")
    assert tails.free == BLOCKS


@pytest.mark.parametrize("known", [6, 13, 14, 17])
def test_what_is_below_already_is_not_waited_for(tails, known):
    tails.tier.known["a"] = 16 * known
    pin = tails.pin("a", 1, 20)
    assert tails.end(pin, PinOutcome.VICTIM, COPY_FIRST, 7) == 7
    free = max(0, known - 13)
    assert tails.free == BLOCKS - 20 + free
    assert (tails.ledger.demoting_blocks, tails.ledger.lingering_blocks) == (
        7 - free,
        13,
    )
    tails.copy("a")
    assert tails.ledger.free_expired(9, at_once=False) == min(known, 13) - 4
    tails.copy("a")
    assert tails.free == BLOCKS - 4


def linger(rig, **tokens):
    """Turns that linger, ten blocks each, and how much of them is to be copied."""
    for number, request_id in enumerate(tokens):
        rig.expire(request_id, 1 + 10 * number, 10)
    rig.tier.unknown = tokens
    assert rig.ledger.lingering_blocks == 10 * len(tokens)


def program_of(rig, request_id):
    return next(t.program for t in rig.ledger._lingering if t.request_id == request_id)


def test_the_turn_that_costs_least_to_copy_goes_first(tails):
    linger(tails, oldest=160, cheapest=16, like_the_oldest=160)
    tails.ledger.free_expired(14, at_once=False)  # ten are free
    assert list(tails.tier.due) == ["cheapest", "oldest"]
    assert tails.tier.due == {"cheapest": 0, "oldest": 16 * 6}


def test_a_turn_somebody_waits_for_goes_last_whatever_it_costs(tails):
    linger(tails, dear=160, cheap=16)
    next(
        t for t in tails.ledger._lingering if t.request_id == "cheap"
    ).program.live_requests = 2
    tails.ledger.free_expired(5, at_once=False)
    assert list(tails.tier.due) == ["dear"]


def test_of_thousands_that_linger_only_the_oldest_are_compared(tails, monkeypatch):
    monkeypatch.setattr(demoting, "COMPARED", 2)
    linger(tails, dear=160, cheap=16, younger=0)
    tails.ledger.free_expired(22, at_once=False)
    assert list(tails.tier.due) == ["cheap", "dear", "younger"]


@pytest.mark.parametrize(
    ("unknown", "has_suffix", "gives"),
    [(0, True, True), (160, False, True), (0, False, True), (160, True, False)],
)
def test_who_runs_takes_at_once_what_costs_no_more_than_itself(
    tails, unknown, has_suffix, gives
):
    linger(tails, a=unknown)
    if has_suffix:
        tails.tier.below["a"] = 16 * 10
    free = tails.free
    assert tails.ledger.free_cheapest(3) == (3 if gives else 0)
    assert tails.free == free + (3 if gives else 0)
    assert tails.tier.due == ({"a": 16 * 7} if gives else {})
    assert tails.ledger.demoting_blocks == 0
    assert tails.ledger.free_expired(3, at_once=True) == 3, "rather than stand still"


def test_a_turn_that_others_use_is_not_given_for_nothing(tails):
    linger(tails, a=0)
    tails.pool.touch(tails.blocks(1, 10))
    assert tails.ledger.free_cheapest(3) == 0
    assert tails.ledger.lingering_blocks == 10


def test_a_pins_rest_gives_way_before_the_pin(tails):
    """Even if a tail below gets out of reach: so it would through the pin."""
    pin = tails.pin("a", 1, 20)
    tails.pool.touch(tails.blocks(21, 10))
    tails.ledger.linger_rest("a", pin.program, tails.blocks(1, 30), 20)
    tails.pool.free_blocks(tails.blocks(21, 10))
    tails.tier.unknown["a"] = 160
    tails.tier.below["a"] = 16 * 30
    assert tails.ledger.free_cheapest(3) == 3
    assert tails.ledger.lingering_blocks == 7
    assert tails.ledger.shrink(pin.pin_id, 2, FREE_NOW).kept_blocks == 18
    assert tails.ledger.lingering_blocks == 0, "out of reach behind the gap"
    assert tails.free == BLOCKS - 18


@pytest.mark.parametrize("known", [0, 6, 14])
def test_where_turns_go_down_whole_a_tail_waits_for_what_it_needs(rig, known):
    """What is known stands at the turn's beginning, not at the tail's."""
    rig.tier.known["a"] = 16 * known
    pin = rig.pin("a", 1, 20)
    rig.ledger.shrink(pin.pin_id, 8, COPY_FIRST)
    assert rig.tier.due == {"a": 0}
    assert rig.ledger.demoting_blocks == 8 - max(0, known - 12)


def test_copies_under_way_are_dropped_after_what_lingers(tails):
    linger(tails, a=160, b=160)
    tails.ledger.free_expired(5, at_once=False)
    assert tails.ledger.demoting_blocks == 5
    assert tails.ledger.free_expired(15, at_once=True) == 15
    assert tails.ledger.take_dropped_copies() == 0
    assert tails.ledger.free_expired(1, at_once=True) == 5
    assert tails.ledger.take_dropped_copies() == 1


def test_what_nobody_comes_back_to_is_given_first_and_not_copied(tails):
    linger(tails, a=0, ended=160)
    next(
        t for t in tails.ledger._lingering if t.request_id == "ended"
    ).program.ended = True
    assert tails.ledger.free_cheapest(3) == 10
    assert tails.tier.of("drop") == ["ended"]
    assert tails.tier.due == {}


@pytest.mark.parametrize("in_parts", [True, False])
def test_a_victim_of_a_running_request_gives_no_more_than_is_needed(tails, in_parts):
    tails.tier.stores_suffixes = in_parts
    pin = tails.pin("a", 1, 20)
    assert tails.end(pin, PinOutcome.VICTIM, FREE_NOW, 3) == (3 if in_parts else 20)
    assert tails.ledger.lingering_blocks == (17 if in_parts else 0)
    assert tails.free == BLOCKS - tails.ledger.lingering_blocks
    assert tails.tier.due == {"a": 16 * 17 if in_parts else 0}


def test_a_pin_that_only_gives_way_to_another_lingers(tails):
    """Under the cap: nobody needs its memory."""
    pin = tails.pin("a", 1, 20)
    assert tails.end(pin, PinOutcome.VICTIM) == 0
    assert tails.ledger.lingering_blocks == 20
    assert tails.tier.due == {}


def test_what_is_not_given_up_for_a_copy_is_let_go(tails):
    """A rewritten history, say: nobody finds it again."""
    pin = tails.pin("a", 1, 20)
    assert tails.ledger.shrink(pin.pin_id, 8, KEEP_CACHED) == (8, 12, 16 * 12)
    assert tails.tier.due == {}
    assert (tails.free, tails.ledger.demoting_blocks) == (BLOCKS - 12, 0)


def test_where_nothing_lingers_turns_go_down_whole(rig):
    """Others read the tier: a tail alone is worth nothing to them."""
    rig.tier.stores_suffixes = True
    pin = rig.pin("a", 1, 20)
    rig.ledger.shrink(pin.pin_id, 8, COPY_FIRST)
    assert rig.tier.due == {"a": 0}


@pytest.mark.parametrize("found", ["head", "all"])
def test_who_found_a_beginning_only_leaves_the_tail_its_copy(tails, found):
    """Another branch of the same program."""
    pin = tails.pin("a", 1, 20)
    tails.end(pin, PinOutcome.VICTIM, COPY_FIRST, 6)
    tails.pool.touch(tails.blocks(1, 14 if found == "head" else 20))
    tails.ledger.on_program_resumed(pin.program)
    assert tails.ledger.demoting_blocks == (6 if found == "head" else 0)
    assert tails.tier.of("drop") == ([] if found == "head" else ["a"])


@pytest.mark.parametrize("when", ["the copy is ordered", "it is asked what is owed"])
def test_a_broken_tier_loses_no_reference(tails, when):
    pin = tails.pin("a", 1, 20)

    def broken(*args, **kwargs):
        raise RuntimeError("broken")

    if when == "the copy is ordered":
        tails.tier.demote = broken
        with pytest.raises(RuntimeError):
            tails.end(pin, PinOutcome.VICTIM, COPY_FIRST, 6)
    else:
        tails.end(pin, PinOutcome.VICTIM, COPY_FIRST, 6)
        tails.tier.has_unstored = broken
        with pytest.raises(RuntimeError):
            tails.ledger.on_settled("a")
    held = sum(tails.ledger.references().values())
    assert tails.free == BLOCKS - held
    tails.ledger.drop_all()
    assert tails.free == BLOCKS


def test_in_an_outage_nothing_stays_behind_a_lingering_head(tails):
    pin = tails.pin("a", 1, 20)
    tails.end(pin, PinOutcome.VICTIM, COPY_FIRST, 6)
    tails.tier.up = False
    tails.copy("a")
    assert tails.tier.of("drop") == ["a"]
    assert tails.free == BLOCKS


def test_a_second_piece_does_not_keep_the_first_waiting(tails):
    pin = tails.pin("a", 1, 20)
    tails.ledger.shrink(pin.pin_id, 4, COPY_FIRST)
    tails.clock.advance(0.8 * WAIT_S)
    tails.ledger.shrink(pin.pin_id, 4, COPY_FIRST)
    tails.clock.advance(0.3 * WAIT_S)
    assert tails.ledger.free_expired(1, at_once=False) == 8


@pytest.mark.parametrize("alone", [True, False])
def test_a_short_tail_is_lost_where_it_would_not_be_found(tails, alone):
    tails.tier.stores_suffixes = alone
    pin = tails.pin("a", 1, 20)
    tails.ledger.shrink(pin.pin_id, 3, COPY_FIRST)
    assert tails.ledger.demoting_blocks == (3 if alone else 0)
    assert tails.free == BLOCKS - (20 if alone else 17)


def with_rest(rig, pinned=12, whole=20):
    """A turn of which the pin has room for the first blocks only."""
    blocks = rig.blocks(1, whole)
    rig.pool.touch(blocks)  # by the request that computed it
    pin = rig.pin("a", 1, pinned)
    rig.ledger.linger_rest("a", pin.program, blocks, pinned)
    rig.pool.free_blocks(blocks)
    return pin


def test_what_a_pin_has_no_room_for_lingers_and_gives_way_first(tails):
    pin = with_rest(tails)
    assert (tails.ledger.lingering_blocks, tails.free) == (8, BLOCKS - 20)
    assert tails.ledger.pressure().free_blocks == BLOCKS - 12
    assert tails.ledger.free_expired(3, at_once=False) == 0
    assert tails.tier.due == {"a": 16 * 17}
    assert tails.ledger.free_expired(8, at_once=False) == 0
    assert tails.tier.due == {"a": 16 * 12}
    assert tails.ledger.soon_free() == 8
    tails.copy("a")
    assert tails.free == BLOCKS - 12
    tails.end(pin)  # it expires: what is owed lingers
    assert (tails.ledger.lingering_blocks, tails.free) == (12, BLOCKS - 12)


def test_what_has_no_room_joins_its_pin_when_that_ends(tails):
    pin = with_rest(tails)
    tails.end(pin)
    assert tails.ledger.lingering_blocks == 20
    assert tails.ledger.pressure().free_blocks == BLOCKS
    tails.ledger.free_expired(20, at_once=False)
    assert tails.tier.due == {"a": 0}
    tails.copy("a")
    assert tails.free == BLOCKS
    assert tails.ledger.references() == {}


@pytest.mark.parametrize("outcome", [PinOutcome.CLAIMED, PinOutcome.ENDED])
def test_what_has_no_room_goes_with_a_pin_that_nobody_comes_back_to(tails, outcome):
    tails.end(with_rest(tails), outcome)
    assert tails.tier.of("drop") == ["a"]
    assert tails.free == BLOCKS
    assert tails.ledger.references() == {}


def test_a_victim_takes_along_what_it_had_no_room_for(tails):
    pin = with_rest(tails)
    tails.end(pin, PinOutcome.VICTIM, COPY_FIRST)
    assert tails.ledger.demoting_blocks == 20
    tails.copy("a")
    assert tails.free == BLOCKS


def test_of_a_victim_goes_down_what_is_needed_and_the_rest_lingers(tails):
    pin, before = tails.pin("a", 1, 20), tails.free
    assert tails.end(pin, PinOutcome.VICTIM, COPY_FIRST, 6) == 6
    assert tails.tier.due == {"a": 16 * 14}
    assert (tails.ledger.demoting_blocks, tails.ledger.lingering_blocks) == (6, 14)
    tails.copy("a")
    assert tails.free == before + 6
    assert tails.ledger.pressure().free_blocks == BLOCKS
    assert tails.ledger.free_expired(4, at_once=False) == 0
    assert tails.tier.due == {"a": 16 * 10}
    tails.copy("a")
    assert tails.ledger.lingering_blocks == 10
    assert tails.ledger.free_expired(100, at_once=False) == 0
    assert tails.tier.due == {"a": 0}
    tails.copy("a")
    assert tails.free == BLOCKS
    assert tails.ledger.references() == {}


def test_blocks_that_others_use_do_not_count_as_given(tails):
    """Three of its last blocks are somebody's running prompt."""
    pin = tails.pin("a", 1, 20)
    tails.pool.touch(tails.blocks(18, 3))
    assert tails.end(pin, PinOutcome.VICTIM, COPY_FIRST, 6) == 6
    assert tails.tier.due == {"a": 16 * 11}


def test_who_runs_takes_the_end_of_what_lingers(tails):
    tails.expire("a", 1, 20)
    assert tails.ledger.free_expired(2, at_once=True) == 2
    assert tails.tier.due == {"a": 16 * 18}
    assert tails.ledger.lingering_blocks == 18
    assert tails.ledger.pressure().free_blocks == BLOCKS
    assert tails.ledger.free_expired(9, at_once=True) == 9
    assert tails.tier.due == {"a": 16 * 9}


@pytest.mark.parametrize(
    ("ahead", "copied"),
    [
        ([], 0),
        ([1], 0),
        ([1, 1], 1),  # each may begin two blocks, and 3 are free
        ([15], 0),
        ([32], 1),
        ([10_000], 2),  # no more than the room there is for it
    ],
)
def test_room_is_kept_for_what_running_requests_are_about_to_need(tails, ahead, copied):
    tails.expire("a", 1, BLOCKS - 3)
    assert tails.ledger.start_copies_ahead(lambda: ahead) == 0
    assert tails.ledger.demoting_blocks == copied


@pytest.mark.parametrize(("ahead", "asked"), [([], 0), ([1], 0), ([1, 1], 1)])
def test_where_nothing_lingers_pins_copy_their_end_ahead(tails, ahead, asked):
    pin = tails.pin("a", 1, BLOCKS - 3)
    assert tails.ledger.start_copies_ahead(lambda: ahead) == asked
    if not asked:
        return
    assert tails.ledger.copy_tail_ahead(pin.pin_id, asked) == asked
    assert tails.tier.due == {"a": 16 * (BLOCKS - 3 - LEAST_PIECE)}
    assert (tails.ledger.demoting_blocks, tails.free) == (0, 3), "the pin keeps them"
    tails.copy("a")
    tails.ledger.copy_tail_ahead(pin.pin_id, asked)
    assert tails.tier.due == {}, "they are below"
    assert tails.ledger.shrink(pin.pin_id, 2, FREE_NOW).freed_blocks == 2
    assert tails.ledger.copy_tail_ahead(pin.pin_id, 100) == BLOCKS - 5
    assert tails.tier.due == {"a": 0}


def test_above_other_tiers_pins_are_left_alone(lingering):
    """There what a running request takes costs no more than itself."""
    lingering.pin("a", 1, BLOCKS - 3)
    assert lingering.ledger.start_copies_ahead(lambda: [1, 1, 1]) == 0


def test_a_turn_of_which_a_part_lingers_keeps_its_place(tails):
    tails.expire("a", 1, 10)
    tails.expire("b", 11, 10)
    tails.ledger.free_expired(4, at_once=False)
    tails.ledger.free_expired(8, at_once=False)
    assert tails.tier.due == {"a": 16 * 2}


@pytest.mark.parametrize("why", ["found-with-its-head-only", "no-linger", "all-below"])
def test_what_has_no_room_is_let_go_where_it_gains_nothing(tails, why):
    if why == "found-with-its-head-only":
        tails.tier.stores_suffixes = False
    elif why == "all-below":
        tails.tier.settled.add("a")
    else:
        tails.ledger._room_blocks = 0
    with_rest(tails)
    assert tails.ledger.lingering_blocks == 0
    assert tails.free == BLOCKS - 12


@pytest.mark.parametrize("how", ["release_demoting", "drop_all"])
@pytest.mark.parametrize("room_blocks", [0, 5])
def test_nothing_stays_after_a_reset(how, room_blocks):
    rig = Rig(room_blocks)
    for number in range(2):
        rig.expire(f"r{number}", 1 + 10 * number, 10)
    getattr(rig.ledger, how)()
    assert rig.tier.of("drop") == ["r0", "r1"]
    assert rig.free == BLOCKS
    assert rig.ledger.references() == {}
    assert rig.ledger.free_expired(math.inf, at_once=True) == 0
