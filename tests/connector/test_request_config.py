"""What `kv_transfer_params` may do to the lower tier: LMCache reads them, too."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

pytest.importorskip("lmcache", reason="the matrix of vLLM versions has no LMCache")

from lmcache.integration.vllm.lmcache_mp_connector import LMCacheMPConnector
from lmcache.integration.vllm.lmcache_mp_metadata import (
    LMCacheMPRequestMetadata,
    LMCacheMPRequestTracker,
)
from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey

from ttlcache_connector.tiers.lmcache.orphaned_lookups import OrphanedLookups
from ttlcache_connector.tiers.lmcache.salts import SaltGenerations
from ttlcache_connector.tiers.lmcache.stores import LMCacheStores

CHUNK = 16


def request_with(params: dict[str, Any]) -> Any:
    return SimpleNamespace(
        request_id="r",
        cache_salt=None,
        sampling_params=SimpleNamespace(extra_args={"kv_transfer_params": params}),
        kv_transfer_params=params,
        all_token_ids=list(range(4 * CHUNK)),
        num_prompt_tokens=4 * CHUNK,
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
    tracker.increase_num_scheduled_tokens(4 * CHUNK)
    return tracker


def stored_tokens(tracker: LMCacheMPRequestTracker) -> int:
    meta = LMCacheMPRequestMetadata.GetStoreMetadata(tracker, CHUNK, [CHUNK])
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


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "value", [1 << 70, "\ud800", "x" * 1_000_000, nested(5000), [1], {"a": 1}]
)
def test_what_cannot_be_sent_is_not(value):
    """Every lookup of the request would fail, or carry it."""
    tracker = tracker_of({"lmcache.wish": value, "lmcache.tag": "a"})
    key = IPCCacheServerKey.from_token_ids(
        "m", 1, 0, [1], request_id="r", request_configs=tracker.request_configs
    )
    assert len(msgspec.msgpack.encode(key)) < 10_000


def test_a_sane_wish_is_lmcaches():
    params = {"lmcache.tag": "a", "lmcache.max_offload_tokens": 16, "other": 1}
    tracker = tracker_of(params)
    assert tracker.request_configs == {
        "lmcache.tag": "a",
        "lmcache.max_offload_tokens": 16,
    }
    assert stored_tokens(tracker) == 16


class Manager:
    """Of LMCache's deferred stores: whether it heard of the request's end."""

    def __init__(self) -> None:
        self.finished: list[str] = []

    def on_request_arrived(self, request_id: str) -> Any:
        return SimpleNamespace(sessions_to_end=[])

    def on_request_finished(self, request_id: str) -> Any:
        self.finished.append(request_id)
        return SimpleNamespace(sessions_to_end=[])


def test_statistics_of_a_request_that_was_never_looked_at():
    """Aborted in the queue: LMCache would raise, and forget to end it."""
    inner = LMCacheMPConnector.__new__(LMCacheMPConnector)
    inner.lazy_offload, inner._lazy_offload_manager = True, Manager()
    inner.request_trackers = {}
    inner.scheduler_adapter = SimpleNamespace(
        _pending_lookups=set(), cleanup_lookup_result=lambda _: None, end_session=None
    )
    half = LMCacheStores.__new__(LMCacheStores)
    half._inner = inner
    half._lookups = SimpleNamespace(end=lambda request_id: None)
    half._salts = SaltGenerations(inner, OrphanedLookups(inner.scheduler_adapter))
    half.finished(request_with({"cached_token_stats": True}), ())
    assert inner._lazy_offload_manager.finished == ["r"]
    assert inner.request_trackers == {}
