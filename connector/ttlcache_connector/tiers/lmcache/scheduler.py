"""Beside the scheduler: lookups, loads and demotions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lmcache.integration.vllm.lmcache_mp_metadata import (
    LMCacheMPConnectorMetadata,
    LMCacheMPWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from ttlcache.clock import default_clock
from ttlcache.config import TTLCacheConfig
from ttlcache_connector.log import logger
from ttlcache_connector.tiers.base import (
    Loaded,
    Reload,
    SchedulerTier,
    TierMetadata,
    TurnEnd,
)
from ttlcache_connector.tiers.lmcache.client import connect
from ttlcache_connector.tiers.lmcache.hint_sender import HintSender
from ttlcache_connector.tiers.lmcache.load_sources import Sources
from ttlcache_connector.tiers.lmcache.lookups import Lookups
from ttlcache_connector.tiers.lmcache.orphaned_lookups import Forsaken
from ttlcache_connector.tiers.lmcache.reconnects import Recoveries
from ttlcache_connector.tiers.lmcache.registration import own_name
from ttlcache_connector.tiers.lmcache.reports import load_times
from ttlcache_connector.tiers.lmcache.salts import Epochs
from ttlcache_connector.tiers.lmcache.store_queue import DemotionQueue
from ttlcache_connector.tiers.lmcache.stored_index import Below, chunk_bytes
from ttlcache_connector.tiers.lmcache.suffix_index import LoneTails

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

log = logger(__name__)


@dataclass(frozen=True, slots=True)
class _Load:
    """A load under way.

    since_s: when it was ordered.
    read_s: the wait for its lookup, which reads what is on disk into CPU memory.
    """

    tokens: int
    since_s: float
    read_s: float
    blocks: frozenset[int]


class SchedulerHalf(SchedulerTier):
    """Lookups, loads and demotions."""

    def __init__(
        self, config: TTLCacheConfig, vllm_config: Any, kv_cache_config: Any
    ) -> None:
        self._mode, self._lingers = config.demote, config.linger
        self._now_s = default_clock().now_s
        self._inner = connect(KVConnectorRole.SCHEDULER, vllm_config, kv_cache_config)
        self._adapter = self._inner.scheduler_adapter
        self._adapter.model_name += own_name(vllm_config, kv_cache_config)
        self._manager = self._inner._lazy_offload_manager  # noqa: SLF001
        chunk_tokens = self.chunk_tokens = self._adapter.lmcache_tokens_per_chunk
        self._queue = DemotionQueue(config.demote, chunk_tokens)
        self._forsaken = Forsaken(self._adapter)
        self._epochs = Epochs(self._inner, self._forsaken)
        self._lookups = Lookups(self._inner, self._epochs, self._now_s)
        self._is_divisible = len(kv_cache_config.kv_cache_groups) == 1
        # Where others read the tier, or no server may take anything with it: none.
        self._below: Below | None = None
        self._pool: BlockPool | None = None
        self._loads: dict[str, _Load] = {}
        self._ahead: tuple[str, list[int], str] | None = None  # promotion under way
        self._sources = Sources(self._adapter, self._now_s)
        self._hints = HintSender(self._adapter, self._now_s)
        self._was_up = True
        self._recoveries = Recoveries(self._adapter)
        parallel = vllm_config.parallel_config
        self._ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
        if self._is_divisible:
            self._chunk_bytes = chunk_bytes(kv_cache_config, chunk_tokens, self._ranks)
        self._is_split = False

    def bind(self, pool: BlockPool) -> None:
        self._pool = pool
        self._inner.bind_gpu_block_pool(pool)
        self._manager._policy = self._queue  # noqa: SLF001 - no registry, see above
        if self._mode != "write-through" and self._is_divisible:
            chunk_tokens = self._adapter.lmcache_tokens_per_chunk
            tails = LoneTails(chunk_tokens, pool.hash_block_size)
            self._queue.tails = self._lookups.starts.tails = tails
            if self._lingers:
                self._below = Below(chunk_tokens, pool.hash_block_size)
                self._queue.below = self._lookups.below = self._below
            self._ask_servers()

    def _ask_servers(self) -> None:
        if self._below is not None:
            self._below.clear()
        if self._lookups.starts.tails is not None:
            self._lookups.starts.ask_servers(self._hear)

    def _hear(self, cpu_bytes: float) -> None:
        if self._below is not None:
            self._below.trust(cpu_bytes, self._chunk_bytes)

    def blocks_are_named(self, names: Collection[str]) -> None:
        if len(names) < self._ranks or len(set(names)) != 1:
            # Each rank says by itself whether our path serves it. A hit needs the
            # chunks of all ranks under one name: there would never be one.
            log.error(
                "ttlcache: %d of %d ranks move KV by LMCache's own code, the others by "
                "ours, in another order of bytes; the lower tier is not used (the "
                "ranks' logs say why)",
                len(names),
                self._ranks,
            )
            self._is_split = True
            return
        (self._adapter.model_name,) = set(names)

    def is_up(self) -> bool:
        up = bool(self._adapter.is_healthy) and not self._is_split
        came_back = up and (not self._was_up or self._recoveries.any_since_asked())
        self._was_up = up
        if came_back:
            self.generation += 1
            self._hints.begin_anew()
            self._ask_servers()  # it may be another one
        return up

    def arrive(self, request: Request, *, has_pin: bool) -> None:
        if not has_pin and not self._is_foreign(request):
            self._lookups.begin_early(request)

    def match(
        self, request: Request, hit_tokens: int, stored_tokens: float = math.inf
    ) -> tuple[int | None, bool]:
        if self._is_foreign(request):
            tracker = self._inner._get_or_create_request_tracker(request)  # noqa: SLF001
            tracker.max_offload_tokens = 0
            return 0, False
        if self._mode == "write-through":
            # Another replica may have gone on with a turn that is pinned here.
            stored_tokens = math.inf
        return self._lookups.match(request, hit_tokens, stored_tokens)

    def was_asked(self, request_id: str) -> bool:
        return self._lookups.was_asked(request_id)

    def allocated(
        self, request: Request, blocks: KVCacheBlocks, loaded_tokens: int
    ) -> None:
        # Without a tracker every later step would fail for all requests.
        self._inner._get_or_create_request_tracker(request)  # noqa: SLF001
        self._inner.update_state_after_alloc(request, blocks, loaded_tokens)
        if loaded_tokens:
            ids = frozenset(i for group in blocks.get_block_ids() for i in group)
            read_s = self._lookups.took_s(request.request_id)
            load = _Load(loaded_tokens, self._now_s(), read_s, ids)
            self._loads[request.request_id] = load
        self._lookups.end(request.request_id)

    def promote(self, request_id: str, tokens: Sequence[int], salt: str) -> bool:
        if self._ahead is not None or self._loads or not self.is_up():
            return False
        below = self._epochs.salt(salt)
        self._ahead = (f"ttlcache-ahead-{request_id}", list(tokens), below)
        # What did not go down with its tail is in GPU memory.
        with self._lookups.starts.beginning_at(self._queue.kept_tokens(request_id)):
            self._adapter.maybe_submit_lookup_request(*self._ahead)
        return True

    def _end_promotion(self) -> None:
        """A lookup brings its context to CPU memory; nobody reads it for now."""
        if self._ahead is None:
            return
        name, tokens, salt = self._ahead
        found = self._adapter.check_lookup_result(name)
        if found is None:
            return
        self._ahead = None
        if found:
            self._adapter.free_lookup_locks(tokens, 0, found, name, salt)
        self._adapter.cleanup_lookup_result(name)
        self._adapter.end_session(name)

    def build_metadata(self, output: SchedulerOutput) -> TierMetadata:
        self._end_promotion()
        self._forsaken.settle()
        self._lookups.next_step()
        inner: LMCacheMPConnectorMetadata = self._inner.build_connector_meta(output)
        if not output.total_num_scheduled_tokens:
            # LMCache leaves such steps out; vLLM 0.32 executes what they order.
            actions = self._manager._drain(output, self._pool)  # noqa: SLF001
            for store in actions.stores_to_submit:
                inner.add_request_metadata(store)
            for request_id in actions.sessions_to_end:
                self._adapter.end_session(request_id)
        for request_id in self._queue.emitted:
            self.on_settled(request_id)
        self._queue.emitted = []
        stores = {r.request_id: r for r in inner.requests if r.direction == "STORE"}
        self._queue.check(stores)
        self._lookups.outdated.copies_begin(stores)
        if self._below is not None and self._pool is not None:
            self._below.copies_begin(stores, self._pool)
        return TierMetadata(inner, is_past=self._mode != "write-through")

    def finished(self, request: Request, block_ids: tuple[list[int], ...]) -> None:
        self._lookups.end(request.request_id)
        # It may leave without blocks.
        self._epochs.forget_lookup(request.request_id)
        # LMCache reads the tracker where a client asks for its statistics.
        self._inner._get_or_create_request_tracker(request)  # noqa: SLF001
        self._inner.request_finished_all_groups(request, block_ids)

    def worker_output(self, output: KVConnectorOutput) -> list[Loaded]:
        self._inner.update_connector_output(output)
        stores = output.kv_connector_worker_meta
        if isinstance(stores, LMCacheMPWorkerMetadata):
            for request_id in stores.completed_store_requests:
                self._copy_ended(
                    request_id, is_lost=request_id in stores.failed_store_requests
                )
        ended, load_s = [], load_times(stores)
        failed = getattr(output, "failed_recving", None) or ()
        for request_id in output.finished_recving or ():
            load = self._loads.pop(request_id, None)
            if load is None:
                continue
            bad = not load.blocks.isdisjoint(output.invalid_block_ids)
            tokens = 0 if bad or request_id in failed else load.tokens
            ended.append(Loaded(request_id, tokens))
            if tokens:
                # Where LMCache's own code copies, all that lies between: other steps,
                # other copies.
                waited_s = self._now_s() - load.since_s
                copy_s = load_s.get(request_id, waited_s)
                self._sources.ask(request_id, tokens, copy_s, load.read_s)
            elif self._below is not None:
                self._below.clear()  # the server promised it
        return ended

    def _copy_ended(self, request_id: str, *, is_lost: bool) -> None:
        """On one rank."""
        self.on_demotion("failed" if is_lost else "stored")
        if not is_lost and self._manager._requests.has_in_flight(request_id):  # noqa: SLF001
            return  # other ranks' receipts are to come
        if self._below is not None:
            self._below.copy_ended(request_id, is_lost=is_lost)
        if is_lost:
            self._lookups.outdated.copy_failed(request_id)
        else:
            self._lookups.outdated.copy_ended(request_id)

    def reloads(self) -> list[Reload]:
        return self._sources.known()

    def has_work(self) -> bool:
        if (
            self._queue.has_due
            or self._sources.is_waiting
            or self._ahead
            or self._forsaken
        ):
            return True
        return bool(self._inner.has_pending_push_work())

    def owes(self, request_id: str) -> bool:
        waits = self._queue.has_pending_request(request_id)
        return waits and self._is_over(request_id) and self.is_up()

    @property
    def takes_tails(self) -> bool:
        return self._lookups.starts.are_heeded

    def has_tail(self, request_id: str) -> bool:
        return self._queue.has_tail(request_id)

    def count_unknown(self, request_id: str, start: int, end: int) -> int:
        return self._queue.count_unknown(request_id, start, end)

    def demote(self, request_id: str, start: int = 0) -> int | None:
        if not self._is_over(request_id) or not self.is_up():
            return None
        return self._queue.make_due(request_id, start)

    def _is_over(self, request_id: str) -> bool:
        """Not a running request under an id that a client uses again."""
        return bool(self._manager._requests.is_finished(request_id))  # noqa: SLF001

    def ahead(self, request_id: str) -> None:
        if self._mode == "idle-ahead":
            self._queue.may_go_ahead(request_id)

    def forget(self, request_id: str) -> None:
        self._queue.forget(request_id)

    def tell(self, turn: TurnEnd) -> None:
        self._hints.tell(turn)

    def references(self) -> dict[int, int]:
        slots = self._manager._requests._slots.values()  # noqa: SLF001
        batches = (slot.in_flight for slot in slots if slot.in_flight is not None)
        return dict(Counter(i for batch in batches for i in batch.block_ids))

    def reset(self) -> bool:
        self._lookups.reset()
        if self._below is not None:
            # These go on storing under their old salt.
            self._below.reset(self._inner.request_trackers)
        self._epochs.begin_anew()
        self.generation += 1
        return True

    def shutdown(self) -> None:
        self._inner.shutdown()

    @staticmethod
    def _is_foreign(request: Request) -> bool:
        """LMCache's keys know neither adapters nor embeddings: never mix those."""
        return (
            request.lora_request is not None
            or getattr(request, "prompt_embeds", None) is not None
        )
