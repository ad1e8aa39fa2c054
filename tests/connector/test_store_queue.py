"""What LMCache's lazy offload is told to store, and when."""

from __future__ import annotations

import pytest

pytest.importorskip("lmcache", reason="the matrix of vLLM versions has no LMCache")

from lmcache.integration.vllm.lazy_offload_manager import _coalesce_store_metadata
from lmcache.integration.vllm.lazy_offload_policy.base import DrainSignals
from lmcache.integration.vllm.lmcache_mp_metadata import LMCacheMPRequestMetadata
from lmcache.integration.vllm.vllm_multi_process_adapter import LoadStoreOp

from ttlcache_connector.tiers.lmcache.store_queue import StoreQueue

CHUNK = 64


def offer(queue: StoreQueue, request_id: str, *, hashed: bool = True) -> None:
    op = LoadStoreOp(token_ids=[], block_ids=[[1, 2]], start=0, end=CHUNK)
    meta = LMCacheMPRequestMetadata(request_id, "STORE", op)
    queue.add(meta, {1: b"one" if hashed else None, 2: b"two"})


def drain(queue: StoreQueue, *blocked: str) -> list[str]:
    signals = DrainSignals(0, 0, set(), set(blocked))
    done = queue.drain(signals)
    settled = queue.take_settled()
    assert settled == [item.request_id for item in done.items]
    return settled


def test_nothing_is_stored_before_it_is_due():
    queue = StoreQueue("on-pressure", CHUNK)
    offer(queue, "a")
    offer(queue, "a")
    assert drain(queue) == []
    assert queue.make_due("a")
    assert drain(queue) == ["a"]
    assert drain(queue) == []
    assert not queue.has_pending_request("a")
    assert not queue.make_due("a")


def test_a_prompt_is_offered_chunk_by_chunk():
    """So that an overwritten tail takes nothing but itself along."""
    queue = StoreQueue("on-pressure", CHUNK)
    ids = [7, 3, 9, 1, 4, 8]
    op = LoadStoreOp(token_ids=list(range(500)), block_ids=[ids], start=64, end=256)
    meta = LMCacheMPRequestMetadata("a", "STORE", op, cache_salt="s")
    queue.add(meta, {i: bytes([i]) for i in ids})
    assert queue.make_due("a")
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
    queue = StoreQueue("write-through", CHUNK)
    offer(queue, "a")
    offer(queue, "b")
    assert drain(queue, "a") == ["b"]
    assert drain(queue) == ["a"]


def test_dropped_turns_are_not_stored_and_their_sessions_end():
    queue = StoreQueue("on-pressure", CHUNK)
    offer(queue, "a")
    queue.make_due("a")
    queue.drop("a")
    assert queue.has_due  # a step is needed to end its session
    done = queue.drain(DrainSignals(0, 0, set(), set()))
    assert done.items == []
    assert done.emptied_request_ids == ["a"]
    assert not queue.has_due


@pytest.mark.parametrize("broken", ["unhashed", "failed"])
def test_after_a_gap_nothing_more_of_the_request_is_stored(broken):
    queue = StoreQueue("on-pressure", CHUNK)
    offer(queue, "a")
    if broken == "unhashed":
        offer(queue, "a", hashed=False)
    else:
        assert queue.mark_store_failed("a") == 1
    offer(queue, "a")
    queue.make_due("a")
    queue.drop_request("a")  # preempted: it starts anew
    offer(queue, "a")
    assert queue.make_due("a")
    assert drain(queue) == ["a"]
