"""What LMCache is told to store: by our queue, and by wishes of clients."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from lmcache.integration.vllm.lazy_offload_manager import _coalesce_store_metadata
from lmcache.integration.vllm.lazy_offload_policy.base import DrainSignals
from lmcache.integration.vllm.lmcache_mp_connector import LMCacheMPConnector
from lmcache.integration.vllm.lmcache_mp_metadata import (
    LMCacheMPRequestMetadata,
    LMCacheMPRequestTracker,
)
from lmcache.integration.vllm.vllm_multi_process_adapter import LoadStoreOp
from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey

from tests.core.test_hints import nested
from ttlcache_connector.tiers.lmcache.orphaned_lookups import OrphanedLookups
from ttlcache_connector.tiers.lmcache.salts import SaltGenerations
from ttlcache_connector.tiers.lmcache.scheduler import LMCacheSchedulerTier
from ttlcache_connector.tiers.lmcache.store_queue import StoreQueue

CHUNK = 64


def offer(queue: StoreQueue, request_id: str, *, hashed: bool = True) -> None:
    op = LoadStoreOp(token_ids=[], block_ids=[[1, 2]], start=0, end=CHUNK)
    meta = LMCacheMPRequestMetadata(request_id, "STORE", op)
    queue.add(meta, {1: b"one" if hashed else None, 2: b"two"})


def drain(queue: StoreQueue, *blocked: str) -> list[str]:
    signals = DrainSignals(0, 0, set(), set(blocked))
    done = queue.drain(signals)
    releasable = queue.take_releasable()
    assert releasable == [item.request_id for item in done.items]
    return releasable


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


# --- what clients wish in `kv_transfer_params`

SMALL = 16  # tokens of a chunk


def request_with(params: dict[str, Any]) -> Any:
    return SimpleNamespace(
        request_id="r",
        cache_salt=None,
        sampling_params=SimpleNamespace(extra_args={"kv_transfer_params": params}),
        kv_transfer_params=params,
        all_token_ids=list(range(4 * SMALL)),
        num_prompt_tokens=4 * SMALL,
        mm_features=[],
        status=None,
    )


def tracker_of(params: dict[str, Any]) -> LMCacheMPRequestTracker:
    """As LMCache makes it, for a request with four chunks computed."""
    adapter = SimpleNamespace(cleanup_lookup_result=None, end_session=None)
    inner = SimpleNamespace(
        scheduler_adapter=adapter,
        request_trackers={},
        _get_or_create_request_tracker=LMCacheMPRequestTracker,
    )
    SaltGenerations(inner, OrphanedLookups(adapter))
    tracker: LMCacheMPRequestTracker = inner._get_or_create_request_tracker(
        request_with(params)
    )
    tracker.append_block_ids(([1, 2, 3, 4],))
    tracker.increase_num_scheduled_tokens(4 * SMALL)
    return tracker


def stored_tokens(tracker: LMCacheMPRequestTracker) -> int:
    meta = LMCacheMPRequestMetadata.GetStoreMetadata(tracker, SMALL, [SMALL])
    return 0 if meta is None else int(meta.op.end)


@pytest.mark.parametrize(
    ("wish", "tokens"),
    [(None, 64), (0, 0), (-5, 0), (33, 32), (1 << 80, 64)]
    + [(wrong, 64) for wrong in ("all", [1], {}, 1.5, float("nan"), True)],
)
def test_no_wish_of_a_client_stops_the_step(wish, tokens):
    """It would raise in every step of the request, and turn the tier off for all."""
    tracker = tracker_of({"lmcache.max_offload_tokens": wish})
    assert stored_tokens(tracker) == tokens


@pytest.mark.parametrize(
    "value", [1 << 70, "\ud800", "x" * 1_000_000, nested(5000), [1], {"a": 1}]
)
def test_what_cannot_be_sent_is_not(value):
    """Every lookup of the request would fail, or carry it."""
    tracker = tracker_of({"lmcache.wish": value, "lmcache.tag": "a"})
    configs = tracker.request_configs
    key = IPCCacheServerKey.from_token_ids(
        "m", 1, 0, [1], request_id="r", request_configs=configs
    )
    assert len(msgspec.msgpack.encode(key)) < 10_000


def test_statistics_of_a_request_that_was_never_looked_at():
    """Aborted in the queue: LMCache would raise, and forget to end it."""
    nothing, finished = SimpleNamespace(sessions_to_end=[]), []

    inner = LMCacheMPConnector.__new__(LMCacheMPConnector)
    inner.lazy_offload = True
    inner._lazy_offload_manager = SimpleNamespace(
        on_request_arrived=lambda _: nothing,
        on_request_finished=lambda name: finished.append(name) or nothing,
    )
    inner.request_trackers = {}
    inner.scheduler_adapter = SimpleNamespace(
        _pending_lookups=set(), cleanup_lookup_result=lambda _: None, end_session=None
    )
    half = LMCacheSchedulerTier.__new__(LMCacheSchedulerTier)
    half._inner = inner
    half._lookups = SimpleNamespace(end=lambda request_id: None)
    half._salts = SaltGenerations(inner, OrphanedLookups(inner.scheduler_adapter))
    half.on_finished(request_with({"cached_token_stats": True}), ())
    assert finished == ["r"]
    assert inner.request_trackers == {}


def test_a_sane_wish_is_lmcaches():
    params = {"lmcache.tag": "a", "lmcache.max_offload_tokens": 16, "other": 1}
    tracker = tracker_of(params)
    assert tracker.request_configs == {
        "lmcache.tag": "a",
        "lmcache.max_offload_tokens": 16,
    }
    assert stored_tokens(tracker) == 16
