"""Beside the scheduler: what is in host memory, and the copies of each step.

Blocks of a copy, on both sides, are referenced from its order until every rank has
reported its end: nothing else can take them meanwhile, whatever becomes of the request.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ttlcache.clock import default_clock
from ttlcache.config import TTLCacheConfig
from ttlcache_connector.engine import hooks
from ttlcache_connector.tiers.base import (
    Loaded,
    Reload,
    SchedulerTier,
    TierMetadata,
    TurnEnd,
)
from ttlcache_connector.tiers.cpu.index import Found, HostIndex, StoredTurn
from ttlcache_connector.tiers.cpu.messages import (
    BlockCopy,
    CopyOrders,
    CopyReport,
    load_times,
)
from ttlcache_connector.tiers.cpu.support import cpu_blocks

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


@dataclass(slots=True)
class _Turn:
    """A finished request's blocks, as long as they are in GPU memory only.

    sources: block and content; one that others have overwritten has another content.
    """

    sources: list[tuple[KVCacheBlock, hooks.BlockHashes]]
    program: str | None = None
    deadline_s: float = 0.0


@dataclass(slots=True)
class _Store:
    """A turn's copy down. missing: what is copied; kept: what was there before."""

    request_id: str
    turn: _Turn
    missing: list[tuple[KVCacheBlock, hooks.BlockHashes]]
    targets: list[KVCacheBlock]
    kept: list[KVCacheBlock]
    ranks_left: int
    has_failed: bool = False
    is_dropped: bool = False


@dataclass(slots=True)
class _Load:
    """A request's copy up."""

    tokens: int
    ordered_s: float
    targets: list[KVCacheBlock]
    sources: list[KVCacheBlock] = field(default_factory=list)


class CPUSchedulerTier(SchedulerTier):
    """Lookups, loads and stores of the CPU tier; every answer is exact and at once."""

    def __init__(
        self, config: TTLCacheConfig, vllm_config: Any, kv_cache_config: Any
    ) -> None:
        self._is_write_through = config.demote == "write-through"
        self._vllm_config = vllm_config
        self._num_blocks = cpu_blocks(config, vllm_config, kv_cache_config)
        self._ranks = vllm_config.parallel_config.world_size
        self._can_shorten = len(kv_cache_config.kv_cache_groups) == 1
        self._now_s = default_clock().now_s
        self._numbers = itertools.count()
        self._found: dict[str, Found] = {}
        self._turns: dict[str, _Turn] = {}
        self._due: dict[str, None] = {}
        self._stores: dict[int, _Store] = {}
        self._loads: dict[str, _Load] = {}
        self._orders = CopyOrders()
        self._settled: list[str] = []
        self._events: list[str] = []
        self._reloads: list[Reload] = []

    def bind(self, manager: KVCacheManager) -> None:
        self._pool = manager.block_pool
        self._sizes = [
            one.block_size for one in manager.coordinator.single_type_managers
        ]
        self.chunk_tokens = math.lcm(*self._sizes)
        self.index = HostIndex(self._num_blocks, self._vllm_config, manager)

    def is_up(self) -> bool:
        return not self.is_off

    # --- lookups and loads -----------------------------------------------

    def match(
        self, request: Request, hit_tokens: int, stored_tokens: float = math.inf
    ) -> tuple[int | None, bool]:
        self._unlock(request.request_id)
        most_tokens = request.num_tokens - 1 - hit_tokens  # one is computed at least
        hashes = request.block_hashes[hit_tokens // self._pool.hash_block_size :]
        # Copies are of whole blocks: they begin where one begins in every group.
        if hit_tokens % self.chunk_tokens or most_tokens <= 0 or not hashes:
            return 0, False
        if request.skip_reading_prefix_cache:
            return 0, False
        found = self.index.find(hashes, hit_tokens, most_tokens)
        if found is None:
            return 0, False
        self._found[request.request_id] = found
        return found.tokens, True

    def was_looked_up(self, request_id: str) -> bool:
        return True

    def allocated(
        self, request: Request, blocks: KVCacheBlocks, loaded_tokens: int
    ) -> None:
        request_id = request.request_id
        if not loaded_tokens:
            self._unlock(request_id)
            return
        found = self._found.pop(request_id)
        load = _Load(loaded_tokens, self._now_s(), [], found.locked)
        self._loads[request_id] = load
        copy = BlockCopy([], [])
        for size, sources, ids in zip(
            self._sizes, found.blocks, blocks.get_block_ids(), strict=True
        ):
            first = found.hit_tokens // size
            # vLLM may have taken less than was found.
            for place, source in enumerate(sources[: -(-loaded_tokens // size)]):
                if not source.is_null:
                    copy.cpu_blocks.append(source.block_id)
                    copy.gpu_blocks.append(ids[first + place])
        load.targets = [self._pool.blocks[i] for i in copy.gpu_blocks]
        self._pool.touch(load.targets)
        self._orders.loads[request_id] = copy

    def _unlock(self, request_id: str) -> None:
        found = self._found.pop(request_id, None)
        if found is not None:
            self.index.unlock(found.locked)

    # --- stores ----------------------------------------------------------

    def finished(self, request: Request, block_ids: tuple[list[int], ...]) -> None:
        request_id = request.request_id
        self._unlock(request_id)
        table = self._pool.blocks
        sources = [
            (block, hashes)
            for ids in block_ids
            for block in (table[i] for i in ids)
            for hashes in [hooks.hashes_of(self._pool, block)]
            if hashes[0]
        ]
        if sources:
            self._turns[request_id] = _Turn(sources, deadline_s=self._now_s())
            if self._is_write_through:
                self._due[request_id] = None

    def report_turn(self, turn: TurnEnd) -> None:
        if turn.ttl_s is None:
            self._turns.pop(turn.request_id, None)
            self._due.pop(turn.request_id, None)
            if turn.program is not None:
                self.index.drop_program(turn.program)
            return
        pending = self._turns.get(turn.request_id)
        if pending is not None:
            pending.program = turn.program
            pending.deadline_s = self._now_s() + turn.ttl_s

    def has_unstored(self, request_id: str) -> bool:
        return request_id in self._turns and self.is_up()

    def demote(self, request_id: str) -> bool:
        if not self.has_unstored(request_id):
            return False
        self._due.setdefault(request_id)
        return True

    def drop(self, request_id: str) -> None:
        self._turns.pop(request_id, None)
        self._due.pop(request_id, None)

    def build_metadata(self, output: SchedulerOutput) -> TierMetadata:
        for request_id in self._due:
            self._order_store(request_id, self._turns.pop(request_id))
            self._settled.append(request_id)
        self._due.clear()
        orders, self._orders = self._orders, CopyOrders()
        return TierMetadata(orders or None, is_past=True)

    def _order_store(self, request_id: str, turn: _Turn) -> None:
        """Copy what is not there yet and still in GPU memory."""
        kept: list[KVCacheBlock] = []
        missing: list[tuple[KVCacheBlock, hooks.BlockHashes]] = []
        for source, hashes in turn.sources:
            there = self.index.block_of(hashes)
            if there is not None:
                kept.append(there)
            elif source.block_hash == hashes[0][0]:
                missing.append((source, hashes))
            elif self._can_shorten:
                break  # a hit ends here
        self.index.lock(kept)
        targets = self.index.take_free(len(missing))
        if len(targets) < len(missing) and not self._can_shorten:
            self.index.unlock(targets)
            targets = []  # a part of some group's blocks is a hit for none
        missing = missing[: len(targets)]
        store = _Store(request_id, turn, missing, targets, kept, self._ranks)
        if not missing:
            self._end_store(store)
            return
        number = next(self._numbers)
        self._stores[number] = store
        sources = [source for source, _ in missing]
        self._pool.touch(sources)
        self._orders.stores[number] = BlockCopy(
            [block.block_id for block in sources],
            [block.block_id for block in targets],
        )

    def _end_store(self, store: _Store) -> None:
        """Every rank has copied: the turn can be found from now on."""
        if store.has_failed or store.is_dropped:
            self.index.unlock([*store.kept, *store.targets])
        else:
            for target, (_, hashes) in zip(store.targets, store.missing, strict=True):
                self.index.set_content(target, hashes)
            blocks = [*store.kept, *store.targets]
            turn = StoredTurn(store.turn.program, store.turn.deadline_s, blocks)
            self.index.keep(store.request_id, turn)
        self._events.append("failed" if store.has_failed else "stored")
        self._pool.free_blocks(source for source, _ in reversed(store.missing))

    def take_settled(self) -> list[str]:
        settled, self._settled = self._settled, []
        return settled

    def take_events(self) -> list[str]:
        events, self._events = self._events, []
        return events

    # --- what workers report ---------------------------------------------

    def worker_output(self, output: KVConnectorOutput) -> list[Loaded]:
        report = output.kv_connector_worker_meta
        if isinstance(report, CopyReport):
            for number, ranks in report.stored.items():
                store = self._stores[number]
                store.ranks_left -= ranks
                store.has_failed |= number in report.failed
                if not store.ranks_left:
                    del self._stores[number]
                    self._end_store(store)
        load_s = load_times(report)
        failed = getattr(output, "failed_recving", None) or ()
        ended = []
        for request_id in output.finished_recving or ():
            load = self._loads.pop(request_id, None)
            if load is None:
                continue
            bad = any(b.block_id in output.invalid_block_ids for b in load.targets)
            tokens = 0 if bad or request_id in failed else load.tokens
            if not tokens:
                self.index.forget(load.sources)  # or it would fail again and again
            self.index.unlock(load.sources)
            self._pool.free_blocks(reversed(load.targets))
            ended.append(Loaded(request_id, tokens))
            if tokens:
                waited_s = self._now_s() - load.ordered_s
                seconds = load_s.get(request_id, waited_s)
                self._reloads.append(Reload("cpu", tokens, seconds))
        return ended

    def reloads(self) -> list[Reload]:
        reloads, self._reloads = self._reloads, []
        return reloads

    def has_work(self) -> bool:
        return bool(self._due or self._stores or self._loads)

    def references(self) -> dict[int, int]:
        counts: Counter[int] = Counter()
        for store in self._stores.values():
            counts.update(source.block_id for source, _ in store.missing)
        for load in self._loads.values():
            counts.update(block.block_id for block in load.targets)
        return counts

    def reset(self) -> bool:
        for request_id in list(self._found):
            self._unlock(request_id)
        self._turns.clear()
        self._due.clear()
        for store in self._stores.values():
            store.is_dropped = True
        self.index.clear()
        self.generation += 1
        return True
