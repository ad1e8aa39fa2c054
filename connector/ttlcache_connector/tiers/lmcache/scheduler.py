"""Beside the scheduler: lookups, loads, demotions and deferred stores."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from lmcache.integration.vllm.lmcache_mp_metadata import (
    LMCacheMPConnectorMetadata,
    LMCacheMPWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from ttlcache.clock import default_clock
from ttlcache.config import TTLCacheConfig
from ttlcache_connector.tiers.base import (
    Loaded,
    Match,
    SchedulerTier,
    TierDemotions,
    TierEvents,
    TierMetadata,
    TurnEnd,
)
from ttlcache_connector.tiers.lmcache.client import HintSender, connect
from ttlcache_connector.tiers.lmcache.lookups import Lookups
from ttlcache_connector.tiers.lmcache.orphaned_lookups import OrphanedLookups
from ttlcache_connector.tiers.lmcache.registration import own_name
from ttlcache_connector.tiers.lmcache.reports import load_times
from ttlcache_connector.tiers.lmcache.salts import SaltGenerations
from ttlcache_connector.tiers.lmcache.store_queue import StoreQueue
from ttlcache_lmcache import internals

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class LMCacheSchedulerTier(SchedulerTier, TierDemotions):
    """Lookups and loads; and stores: LMCache defers them, and asks our queue."""

    is_shared = True

    def __init__(
        self, config: TTLCacheConfig, vllm_config: Any, kv_cache_config: Any
    ) -> None:
        self._mode = config.demote
        self._now_s = default_clock().now_s
        self._inner = connect(KVConnectorRole.SCHEDULER, vllm_config, kv_cache_config)
        self._adapter = self._inner.scheduler_adapter
        self._adapter.model_name += own_name(vllm_config, kv_cache_config)
        self._deferred = internals.DeferredStores(self._inner)
        self.chunk_tokens = self._adapter.lmcache_tokens_per_chunk
        self._queue = StoreQueue(config.demote, self.chunk_tokens)
        self._orphans = OrphanedLookups(self._adapter)
        self._salts = SaltGenerations(self._inner, self._orphans)
        self._lookups = Lookups(self._inner, self._salts)
        self._pool: BlockPool | None = None
        self._loads: dict[str, tuple[int, float]] = {}  # tokens, and since when
        self._events = TierEvents()
        self._hints = HintSender(self._adapter, self._now_s)
        self.demotions = self

    def bind(self, manager: KVCacheManager) -> None:
        self._pool = manager.block_pool
        self._inner.bind_gpu_block_pool(self._pool)
        self._deferred.use(self._queue)

    def is_up(self) -> bool:
        return bool(self._adapter.is_healthy) and not self.is_off

    def on_arrival(self, request: Request, *, has_pin: bool) -> None:
        if not has_pin and not self._is_foreign(request):
            self._lookups.begin_early(request)

    def match(
        self, request: Request, hit_tokens: int, lookup_limit_tokens: float
    ) -> Match:
        if self._is_foreign(request):
            return Match()
        if self._mode == "write-through":
            # Another replica may have gone on with a turn that is pinned here.
            lookup_limit_tokens = math.inf
        return self._lookups.match(request, hit_tokens, lookup_limit_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, external_tokens: int
    ) -> None:
        # Without a tracker every later step would fail for all requests.
        tracker = self._salts.tracker_of(request)
        if self.is_off or self._is_foreign(request):
            tracker.max_offload_tokens = 0
        if not (external_tokens or self._adapter.is_healthy):
            # LMCache unlocks nothing now, at a server that may be back soon.
            self._salts.orphan_lookup(request.request_id)
        self._inner.update_state_after_alloc(request, blocks, external_tokens)
        if external_tokens:
            self._loads[request.request_id] = (external_tokens, self._now_s())
        self._lookups.end(request.request_id)

    def build_metadata(self, output: SchedulerOutput) -> TierMetadata:
        self._orphans.settle()
        self._lookups.next_step()
        inner: LMCacheMPConnectorMetadata = self._inner.build_connector_meta(output)
        if not output.total_num_scheduled_tokens and self._pool is not None:
            # LMCache leaves such steps out; vLLM 0.32 executes what they order.
            actions = self._deferred.drain(output, self._pool)
            for store in actions.stores_to_submit:
                inner.add_request_metadata(store)
            for request_id in actions.sessions_to_end:
                self._adapter.end_session(request_id)
        return TierMetadata(inner, stores_before_forward=self._mode != "write-through")

    def abandon(self, request_ids: Collection[str]) -> None:
        # What LMCache still means to load would go to blocks that are others' by then.
        for request_id in request_ids:
            self._loads.pop(request_id, None)
            self._salts.orphan_lookup(request_id)
            internals.forget_load(self._inner, request_id, self.chunk_tokens)
            self._events.loaded.append(Loaded(request_id, 0))

    def on_worker_output(self, output: KVConnectorOutput) -> None:
        self._inner.update_connector_output(output)
        stores = output.kv_connector_worker_meta
        if isinstance(stores, LMCacheMPWorkerMetadata):
            for request_id in stores.completed_store_requests:
                is_lost = request_id in stores.failed_store_requests
                self._events.demotions.append("failed" if is_lost else "stored")
        load_s = load_times(stores)
        for request_id in output.finished_recving or ():
            if request_id not in self._loads:
                continue
            tokens, since_s = self._loads.pop(request_id)
            # Where LMCache's own code copies, all that lies between: other steps, other
            # copies.
            seconds = load_s.get(request_id, self._now_s() - since_s)
            loaded = 0 if request_id in output.failed_recving else tokens
            self._events.loaded.append(Loaded(request_id, loaded, seconds))

    def take_events(self) -> TierEvents:
        events, self._events = self._events, TierEvents()
        events.releasable = self._queue.take_releasable()
        return events

    def has_work(self) -> bool:
        ours = self._queue.has_due or (self._orphans and self._adapter.is_healthy)
        return bool(ours or self._inner.has_pending_push_work())

    def reset(self) -> bool:
        self._salts.start_generation()
        return True

    def shutdown(self) -> None:
        self._inner.shutdown()

    # --- finished requests (`TierDemotions`) ----------------------------------

    def on_finished(self, request: Request, block_ids: tuple[list[int], ...]) -> None:
        self._lookups.end(request.request_id)
        # It may leave without blocks.
        self._salts.orphan_lookup(request.request_id)
        # LMCache reads the tracker where a client asks for its statistics.
        self._salts.tracker_of(request)
        self._inner.request_finished_all_groups(request, block_ids)

    def can_be_demoted(self, request_id: str) -> bool:
        waits = self._queue.has_pending_request(request_id)
        waits, is_up = waits and self._deferred.is_finished(request_id), self.is_up()
        if waits and not is_up:
            self.drop(request_id)  # or it would wait for ever
        return waits and is_up

    def demote(self, request_id: str) -> bool:
        return self.can_be_demoted(request_id) and self._queue.make_due(request_id)

    def drop(self, request_id: str) -> None:
        self._queue.drop(request_id)

    def report_turn(self, turn: TurnEnd) -> None:
        self._hints.report_turn(turn)

    def references(self) -> dict[int, int]:
        return self._deferred.references()

    @staticmethod
    def _is_foreign(request: Request) -> bool:
        """LMCache's keys know neither adapters nor embeddings: never mix those."""
        return request.lora_request is not None or request.prompt_embeds is not None
