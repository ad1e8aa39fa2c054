"""Beside the scheduler: what of a request is in host memory, and the loads."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ttlcache.clock import default_clock
from ttlcache.config import TTLCacheConfig
from ttlcache.errors import TransferError
from ttlcache_connector.tiers.base import (
    Fill,
    Loaded,
    Match,
    SchedulerTier,
    TierEvents,
    TierMetadata,
)
from ttlcache_connector.tiers.cpu.budget import block_bytes
from ttlcache_connector.tiers.cpu.demotions import Copies, CPUDemotions
from ttlcache_connector.tiers.cpu.index import Found, HeldBlocks, HostIndex
from ttlcache_connector.tiers.cpu.messages import BlockCopy, CopyOrders, CopyReport

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


@dataclass(frozen=True, slots=True)
class _Load:
    """A request's copy up."""

    tokens: int
    ordered_s: float
    sources: list[KVCacheBlock]
    targets: list[KVCacheBlock]


class CPUSchedulerTier(SchedulerTier):
    """Every answer is exact and at once: this half decides what is where."""

    demotions: CPUDemotions
    loads_wait_for_steps = True

    def __init__(
        self,
        config: TTLCacheConfig,
        vllm_config: Any,
        kv_cache_config: Any,
        num_blocks: int,
    ) -> None:
        """
        Args:
            num_blocks: of host memory, on each rank.
        """
        self._config, self._vllm_config = config, vllm_config
        self._num_blocks = num_blocks
        self._block_bytes = block_bytes(kv_cache_config)
        self._has_groups = len(kv_cache_config.kv_cache_groups) > 1
        self._now_s = default_clock().now_s
        self._found: dict[str, Found] = {}
        self._asked: tuple[object, ...] = ()
        self._answer: Found | None = None
        self._orders: dict[str, BlockCopy] = {}
        self._ranks = vllm_config.parallel_config.tensor_parallel_size
        self._loads: Copies[str, _Load] = Copies(self._ranks)
        self._events = TierEvents()

    def bind(self, manager: KVCacheManager) -> None:
        self._manager, self._pool = manager, manager.block_pool
        self._sizes = [
            one.block_size for one in manager.coordinator.single_type_managers
        ]
        self.chunk_tokens = math.lcm(*self._sizes)
        self.index = HostIndex(self._num_blocks, self._vllm_config, manager)
        self._held = HeldBlocks(self._pool)
        self.demotions = CPUDemotions(
            self._pool,
            self.index,
            self._held,
            self._ranks,
            has_groups=self._has_groups,
            is_write_through=self._config.demote == "write-through",
        )

    def is_up(self) -> bool:
        is_stalled = self._loads.is_stalled or self.demotions.copies.is_stalled
        return not (self.is_off or is_stalled)

    def match(
        self, request: Request, hit_tokens: int, lookup_limit_tokens: float
    ) -> Match:
        most_tokens = request.num_tokens - 1 - hit_tokens  # one is computed at least
        # Copies are of whole blocks: they begin where one begins in every group.
        if hit_tokens % self.chunk_tokens or most_tokens <= 0:
            return Match(is_answered=True)
        if request.skip_reading_prefix_cache or not self.is_up():
            return Match(is_answered=True)
        # vLLM asks for the head of the queue in every step until it gets its blocks.
        last = request.block_hashes[-1] if request.block_hashes else None
        asked = (last, most_tokens, hit_tokens, self.index.version)
        if asked != self._asked:
            hashes = request.block_hashes[hit_tokens // self._pool.hash_block_size :]
            self._answer = self.index.find(hashes, hit_tokens, most_tokens)
            self._asked = asked
        found = self._answer
        if found is None:
            return Match(is_answered=True)
        self._found[request.request_id] = found
        return Match(found.tokens, is_answered=True)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, external_tokens: int
    ) -> None:
        if not external_tokens:
            return
        request_id = request.request_id
        # Of this very step: until its end nothing takes a block of host memory.
        found = self._found.pop(request_id)
        copy, loaded = BlockCopy([], []), []
        for size, sources, ids in zip(
            self._sizes, found.blocks, blocks.get_block_ids(), strict=True
        ):
            first = found.hit_tokens // size
            # vLLM may have taken less than was found.
            for place, source in enumerate(sources[: -(-external_tokens // size)]):
                if ids[first + place] == self._pool.null_block.block_id:
                    continue
                if source.is_null:
                    # Or it would be found again.
                    self.index.forget(itertools.chain(*found.blocks))
                    raise TransferError(f"{request_id}: the hit has too few blocks")
                loaded.append(source)
                copy.cpu_blocks.append(source.block_id)
                copy.gpu_blocks.append(ids[first + place])
        targets = [self._pool.blocks[i] for i in copy.gpu_blocks]
        self._held.hold(targets)
        self.index.lock(loaded)
        load = _Load(external_tokens, self._now_s(), loaded, targets)
        self._loads.begin(request_id, load)
        self._orders[request_id] = copy

    def build_metadata(self, output: SchedulerOutput) -> TierMetadata:
        loads, self._orders = self._orders, {}
        self._found.clear()
        overdue = set(self._loads) if self._loads.is_stalled else set()
        unwritten = self._unwritten(output) if self.demotions.due else set()
        stores = self.demotions.order(unwritten, is_up=self.is_up())
        orders = CopyOrders(stores, loads, overdue)
        return TierMetadata(orders or None, stores_before_forward=True)

    def _unwritten(self, output: SchedulerOutput) -> set[int]:
        """Blocks that this step writes: they have their hashes before their content."""
        found: set[int] = set()
        for new in output.scheduled_new_reqs:
            for size, ids in zip(self._sizes, new.block_ids, strict=True):
                found.update(ids[new.num_computed_tokens // size :])
        cached = output.scheduled_cached_reqs
        each = cached.req_ids, cached.num_computed_tokens, cached.new_block_ids
        for request_id, computed, new_ids in zip(*each, strict=True):
            if request_id not in cached.resumed_req_ids:  # which are told all they have
                for ids in new_ids or ():
                    found.update(ids)
            # And what is filled now: it was allocated in a step before.
            end = computed + output.num_scheduled_tokens[request_id]
            if all(computed // size == end // size for size in self._sizes):
                continue
            held = self._manager.get_blocks(request_id).blocks
            for size, blocks in zip(self._sizes, held, strict=True):
                filled = blocks[computed // size : end // size]
                found.update(block.block_id for block in filled)
        return found

    def abandon(self, request_ids: Collection[str]) -> None:
        for request_id in request_ids:
            self._orders.pop(request_id, None)
            load = self._loads.pop(request_id, None)
            if load is not None:
                self._release(load)
            self._events.loaded.append(Loaded(request_id, 0))

    def _release(self, load: _Load) -> None:
        self.index.unlock(load.sources)
        self._held.release(load.targets)

    def on_worker_output(self, output: KVConnectorOutput) -> None:
        report = output.kv_connector_worker_meta
        if not isinstance(report, CopyReport):
            report = CopyReport()  # nothing ended, or another connector's
        self.is_off |= not report.can_copy
        for request_id in output.finished_recving or ():
            load = self._loads.get(request_id)
            if load is None:
                continue
            # vLLM keeps a rank's word until the last rank is done.
            tokens = 0 if request_id in output.failed_recving else load.tokens
            if not tokens:
                self.index.forget(load.sources)  # or it would fail again and again
            waited_s = self._now_s() - load.ordered_s
            seconds = report.load_s.get(request_id, waited_s)
            self._events.loaded.append(Loaded(request_id, tokens, seconds))
        for _, load, _ in self._loads.take_ended(report):
            self._release(load)
        self.demotions.on_report(report)

    def take_events(self) -> TierEvents:
        events, self._events = self._events, TierEvents()
        events.demotions, self.demotions.outcomes = self.demotions.outcomes, []
        events.releasable, self.demotions.releasable = self.demotions.releasable, []
        return events

    def fill(self) -> Fill:
        size = self._block_bytes * self._ranks  # of a block on all ranks
        used, budget = self.index.used_blocks, self._num_blocks - 1
        return Fill(used * size, budget * size)

    def has_work(self) -> bool:
        # What does not end must not keep an idle engine, or its end, waiting.
        return self.is_up() and bool(self.demotions or self._loads)

    def reset(self) -> bool:
        self.demotions.reset()
        self.index.clear()
        return True
