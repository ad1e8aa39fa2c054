"""What LMCache's lazy offload is told to store, and when."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("lmcache", reason="the matrix of vLLM versions has no LMCache")

from lmcache.integration.vllm.lazy_offload_manager import _coalesce_store_metadata
from lmcache.integration.vllm.lazy_offload_policy.base import DrainSignals
from lmcache.integration.vllm.lmcache_mp_metadata import LMCacheMPRequestMetadata
from lmcache.integration.vllm.vllm_multi_process_adapter import LoadStoreOp
from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id

from ttlcache_connector.tiers.lmcache import suffix_index
from ttlcache_connector.tiers.lmcache.store_queue import DemotionQueue
from ttlcache_connector.tiers.lmcache.suffix_index import LoneTails

CHUNK, BLOCK = 64, 32


def offer(queue: DemotionQueue, request_id: str, *, hashed: bool = True) -> None:
    op = LoadStoreOp(token_ids=[], block_ids=[[1, 2]], start=0, end=CHUNK)
    meta = LMCacheMPRequestMetadata(request_id, "STORE", op)
    queue.add(meta, {1: b"one" if hashed else None, 2: b"two"})


def drain(queue: DemotionQueue, *blocked: str) -> list[str]:
    signals = DrainSignals(0, 0, set(), set(blocked))
    done = queue.drain(signals)
    assert queue.emitted == [item.request_id for item in done.items]
    return queue.emitted


def test_nothing_is_stored_before_it_is_due():
    queue = DemotionQueue("expiry", CHUNK)
    offer(queue, "a")
    offer(queue, "a")
    assert drain(queue) == []
    assert queue.make_due("a") is not None
    assert drain(queue) == ["a"]
    assert drain(queue) == []
    assert not queue.has_pending_request("a")
    assert queue.make_due("a") is None


def test_a_prompt_is_offered_chunk_by_chunk():
    """So that an overwritten tail takes nothing but itself along."""
    queue = DemotionQueue("expiry", CHUNK)
    ids = [7, 3, 9, 1, 4, 8]
    op = LoadStoreOp(token_ids=list(range(500)), block_ids=[ids], start=64, end=256)
    meta = LMCacheMPRequestMetadata("a", "STORE", op, cache_salt="s")
    queue.add(meta, {i: bytes([i]) for i in ids})
    assert queue.make_due("a") is not None
    (item,) = queue.drain(DrainSignals(0, 0, set(), set())).items
    assert [(m.op.start, m.op.end, m.op.block_ids) for m, _ in item.metadatas] == [
        (64, 128, [[7, 3]]),
        (128, 192, [[9, 1]]),
        (192, 256, [[4, 8]]),
    ]
    assert [hashes for _, hashes in item.metadatas] == [
        {7: b"\x07", 3: b"\x03"},
        {9: b"\x09", 1: b"\x01"},
        {4: b"\x04", 8: b"\x08"},
    ]
    assert {m.cache_salt for m, _ in item.metadatas} == {"s"}
    merged = _coalesce_store_metadata([m for m, _ in item.metadatas])
    assert (merged.op.start, merged.op.end, merged.op.block_ids) == (64, 256, [ids])


def test_a_request_with_a_store_under_way_waits():
    queue = DemotionQueue("write-through", CHUNK)
    offer(queue, "a")
    offer(queue, "b")
    assert drain(queue, "a") == ["b"]
    assert drain(queue) == ["a"]


def test_forgotten_turns_are_not_stored_and_their_sessions_end():
    queue = DemotionQueue("expiry", CHUNK)
    offer(queue, "a")
    queue.make_due("a")
    queue.forget("a")
    assert queue.has_due  # a step is needed to end its session
    done = queue.drain(DrainSignals(0, 0, set(), set()))
    assert done.items == []
    assert done.emptied_request_ids == ["a"]
    assert not queue.has_due


def test_ahead_one_at_a_time_and_only_while_nothing_else_is_copied():
    queue = DemotionQueue("idle-ahead", CHUNK)
    for name in "abc":
        offer(queue, name)
    queue.may_go_ahead("a")
    queue.may_go_ahead("b")
    queue.make_due("c")
    assert drain(queue) == ["c"]
    assert drain(queue, "c") == []
    assert drain(queue) == ["a"]
    assert queue.has_due  # an idle engine goes on stepping for it
    assert drain(queue) == ["b"]
    assert not queue.has_due


@pytest.mark.parametrize("broken", ["unhashed", "failed"])
def test_after_a_gap_nothing_more_of_the_request_is_stored(broken):
    queue = DemotionQueue("expiry", CHUNK)
    offer(queue, "a")
    if broken == "unhashed":
        offer(queue, "a", hashed=False)
    else:
        assert queue.mark_store_failed("a") == 1
    offer(queue, "a")
    queue.make_due("a")
    queue.drop_request("a")  # preempted: it starts anew
    offer(queue, "a")
    assert queue.make_due("a") is not None
    assert drain(queue) == ["a"]


def offer_context(queue: DemotionQueue, chunks: int, first: int = 0) -> None:
    """Blocks 2n and 2n + 1 are chunk n."""
    ids = list(range(2 * first, 2 * (first + chunks)))
    tokens = list(range(1000))
    op = LoadStoreOp(
        token_ids=tokens,
        block_ids=[ids],
        start=first * CHUNK,
        end=(first + chunks) * CHUNK,
    )
    meta = LMCacheMPRequestMetadata("a", "STORE", op)
    queue.add(meta, {i: hash_of(i) for i in ids})


def hash_of(block_id: int) -> Any:
    return make_block_hash_with_group_id(BlockHash(bytes([block_id])), 0)


def ranges(queue: DemotionQueue) -> list[tuple[int, int]]:
    items = queue.drain(DrainSignals(0, 0, set(), set())).items
    return [
        (m.op.start // CHUNK, m.op.end // CHUNK) for i in items for m, _ in i.metadatas
    ]


@pytest.fixture
def queue() -> DemotionQueue:
    made = DemotionQueue("expiry", CHUNK)
    made.tails = LoneTails(CHUNK, BLOCK)
    return made


@pytest.mark.parametrize("start", [2 * CHUNK, 2 * CHUNK + BLOCK, 3 * CHUNK - 1])
def test_a_tail_is_stored_alone_from_the_chunk_it_begins_in(queue, start):
    offer_context(queue, 3)
    offer_context(queue, 1, first=3)
    assert queue.make_due("a", start) is not None
    assert ranges(queue) == [(2, 3), (3, 4)]
    assert queue.has_pending_request("a"), "its head is owed"
    assert list(queue.tails._before) == [bytes([3])]
    assert queue.make_due("a", start) is None, "nothing is left of the tail"
    assert queue.make_due("a") is not None
    assert ranges(queue) == [(0, 1), (1, 2)]
    assert not queue.has_pending_request("a")
    assert len(queue.tails) == 0, "it is not alone any more"


def test_two_tails_of_one_turn_go_as_one(queue):
    offer_context(queue, 4)
    assert queue.make_due("a", 3 * CHUNK) is not None
    assert queue.make_due("a", 2 * CHUNK) is not None
    assert queue.make_due("a", 3 * CHUNK) is not None
    assert ranges(queue) == [(2, 3), (3, 4)]


def test_what_is_below_at_its_beginning_is_not_stored_again(queue):
    queue.below = known_chunks(0, 1, 3)
    offer_context(queue, 6)
    assert queue.make_due("a") == 2 * CHUNK
    assert ranges(queue) == [(2, 3), (3, 4), (4, 5), (5, 6)], "one piece"
    assert not queue.has_pending_request("a")
    assert queue.emitted == ["a"]


@pytest.mark.parametrize(("start", "begin"), [(3, 4), (4, 4), (5, 5)])
def test_a_tail_begins_where_it_is_not_below(queue, start, begin):
    queue.below = known_chunks(0, 1, 3)
    offer_context(queue, 2)
    offer_context(queue, 4, first=2)
    assert queue.make_due("a", start * CHUNK) == begin * CHUNK
    assert ranges(queue) == [(n, n + 1) for n in range(begin, 6)]
    assert list(queue.tails._before) == [bytes([2 * start - 1])]


@pytest.mark.parametrize(
    ("start", "chunks"),
    [(0, 4), (3 * CHUNK, 2), (4 * CHUNK + BLOCK, 2), (6 * CHUNK, 0)],
)
def test_what_a_copy_would_take_is_counted(queue, start, chunks):
    queue.below = known_chunks(0, 3)
    offer_context(queue, 2)
    offer_context(queue, 4, first=2)
    end = 6 * CHUNK + BLOCK
    assert queue.count_unknown("a", start, end) == chunks * CHUNK + BLOCK
    assert queue.count_unknown("nobody", start, end) == 0
    queue.below = None
    assert queue.count_unknown("a", 0, end) == 6 * CHUNK + BLOCK
    queue.make_due("a", 5 * CHUNK)
    ranges(queue)
    assert queue.count_unknown("a", 0, end) == 5 * CHUNK


def test_a_tail_that_is_below_is_a_tail_at_once(queue):
    queue.below = known_chunks(3, 4, 5)
    offer_context(queue, 6)
    assert queue.make_due("a", 3 * CHUNK) is None
    assert list(queue.tails._before) == [bytes([5])]
    assert queue.kept_tokens("a") == 3 * CHUNK
    assert not queue.has_due
    assert queue.make_due("a") == 0
    assert ranges(queue) == [(0, 1), (1, 2), (2, 3)]


def test_a_turn_that_is_below_is_over_at_once(queue):
    queue.below = known_chunks(0, 1, 2)
    offer_context(queue, 3)
    assert queue.make_due("a") is None
    assert not queue.has_pending_request("a")
    done = queue.drain(DrainSignals(0, 0, set(), set()))
    assert (done.items, done.emptied_request_ids) == ([], ["a"])


def test_a_copy_that_is_due_is_not_undone_by_what_is_known(queue):
    queue.below = known_chunks(3)
    offer_context(queue, 4)
    assert queue.make_due("a", CHUNK) == CHUNK
    assert queue.make_due("a", 3 * CHUNK) == 3 * CHUNK
    assert ranges(queue) == [(1, 2), (2, 3), (3, 4)]


def test_what_was_let_go_between_two_orders_is_not_stored(queue):
    """It may be overwritten, and LMCache would leave out all that follows it."""
    queue.below = known_chunks(2, 3)
    offer_context(queue, 6)
    assert queue.make_due("a", 2 * CHUNK) == 4 * CHUNK
    assert queue.make_due("a", CHUNK) == CHUNK
    assert queue.make_due("a", 3 * CHUNK) == 3 * CHUNK, "it is due already"
    queue.below.clear()
    assert ranges(queue) == [(4, 5), (5, 6)]
    assert queue.emitted == [], "somebody waits for the rest"
    assert queue.has_due
    assert ranges(queue) == [(1, 2)]
    assert queue.emitted == ["a"]
    assert queue.make_due("a") == 0


def test_what_is_known_before_a_tail_that_is_due_belongs_to_it(queue):
    queue.below = known_chunks(1, 2)
    offer_context(queue, 4)
    assert queue.make_due("a", 3 * CHUNK) == 3 * CHUNK
    assert queue.make_due("a", CHUNK) is None
    assert ranges(queue) == [(3, 4)]
    assert list(queue.tails._before) == [bytes([1])]


@pytest.mark.parametrize("ends", ["stored", "overwritten", "failed"])
def test_a_tail_is_one_if_it_got_below(queue, ends):
    offer_context(queue, 4)
    queue.make_due("a", 2 * CHUNK)
    assert not queue.has_tail("a")
    ranges(queue)
    queue.check([] if ends == "overwritten" else ["a"])
    if ends == "failed":
        queue.mark_store_failed("a")
    assert queue.has_tail("a") is (ends == "stored")
    queue.make_due("a")
    ranges(queue)
    assert not queue.has_tail("a"), "all of it is below"


def known_chunks(*chunks: int) -> set[bytes]:
    return {bytes([2 * each + 1]) for each in chunks}


def test_a_sessions_end_waits_for_the_head(queue):
    offer_context(queue, 4)
    queue.make_due("a", 2 * CHUNK)
    assert queue.drain(DrainSignals(0, 0, set(), set())).emptied_request_ids == []
    queue.make_due("a")
    assert queue.drain(DrainSignals(0, 0, set(), set())).emptied_request_ids == ["a"]


def test_a_tail_behind_what_was_below_before_is_not_alone(queue):
    offer_context(queue, 2, first=5)
    queue.make_due("a", 5 * CHUNK)
    assert ranges(queue) == [(5, 6), (6, 7)]
    assert len(queue.tails) == 0
    assert not queue.has_pending_request("a")


def test_what_goes_ahead_goes_ahead_after_its_tail_too():
    queue = DemotionQueue("idle-ahead", CHUNK)
    offer_context(queue, 4)
    queue.may_go_ahead("a")
    queue.make_due("a", 2 * CHUNK)
    assert ranges(queue) == [(2, 3), (3, 4)]
    assert ranges(queue) == [(0, 1), (1, 2)]


def request_of(hashes: list[int]) -> Any:
    """A request of so many blocks, and a token more."""
    return SimpleNamespace(block_hashes=[bytes([each]) for each in hashes])


def test_a_tail_that_failed_leaves_its_head_to_be_stored(queue):
    offer_context(queue, 4)
    queue.make_due("a", 2 * CHUNK)
    assert ranges(queue) == [(2, 3), (3, 4)]
    assert queue.kept_tokens("a") == 2 * CHUNK
    queue.mark_store_failed("a")
    assert queue.make_due("a") is not None
    assert ranges(queue) == [(0, 1), (1, 2)]
    assert queue.kept_tokens("a") == 0
    queue.mark_store_failed("a")
    offer_context(queue, 1)
    assert not queue.has_pending_request("a"), "a gap: the rest is out of reach"


def test_a_lone_tail_is_known_by_the_block_before_it():
    tails = LoneTails(CHUNK, BLOCK)
    request = request_of(list(range(8)))
    assert tails.last_within(request, 8 * BLOCK) == 0
    tails.add(bytes([3]))
    found = [tails.last_within(request, n * BLOCK) for n in range(9)]
    assert found == [0] * 4 + [2 * CHUNK] * 5
    tails.add(bytes([5]))
    assert tails.last_within(request, 8 * BLOCK) == 3 * CHUNK
    assert tails.last_within(request_of([0, 1, 2, 9, 4]), 5 * BLOCK) == 0, "another's"
    tails.discard(bytes([3]))
    tails.discard(bytes([5]))
    assert tails.last_within(request, 8 * BLOCK) == 0


def test_only_so_many_lone_tails_are_remembered(monkeypatch):
    monkeypatch.setattr(suffix_index, "MEMORY", 2)
    tails = LoneTails(BLOCK, BLOCK)
    for each in (1, 2, 1, 3):
        tails.add(bytes([each]))
    assert list(tails._before) == [bytes([1]), bytes([3])]
