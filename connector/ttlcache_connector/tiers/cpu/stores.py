"""Finished turns on their way to host memory.

Blocks of a copy, on both sides, are referenced from its order until every rank has
reported its end: nothing else can take them meanwhile.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ttlcache.clock import default_clock
from ttlcache_connector.engine import hooks
from ttlcache_connector.tiers.base import TierStores, TurnEnd
from ttlcache_connector.tiers.cpu.index import HostIndex, StoredTurn
from ttlcache_connector.tiers.cpu.messages import BlockCopy, CopyReport

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request


class HeldBlocks:
    """Blocks of the GPU's pool that copies hold."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self.counts: Counter[int] = Counter()  # by block id

    def hold(self, blocks: Sequence[KVCacheBlock]) -> None:
        self._pool.touch(blocks)
        self.counts.update(block.block_id for block in blocks)

    def release(self, blocks: Sequence[KVCacheBlock]) -> None:
        self.counts.subtract(block.block_id for block in blocks)
        self.counts += Counter()  # without zeros
        self._pool.free_blocks(reversed(blocks))


@dataclass(slots=True)
class _Turn:
    """A finished request that may go down.

    sources: block and content; one that others have overwritten has another content.
    """

    sources: list[tuple[KVCacheBlock, hooks.BlockHashes]]
    deadline_s: float
    program: str | None = None


@dataclass(slots=True)
class _Store:
    """A turn's copy down.

    missing: what is copied, as far as there is room for it.
    kept: what was there before.
    """

    request_id: str
    turn: _Turn
    missing: list[tuple[KVCacheBlock, hooks.BlockHashes]]
    targets: list[KVCacheBlock]
    kept: list[KVCacheBlock]
    ranks_left: int
    is_partial: bool
    has_failed: bool = False
    is_dropped: bool = False


class CPUStores(TierStores):
    """What is to be copied, what is being copied, and what that made of turns."""

    def __init__(
        self,
        pool: BlockPool,
        index: HostIndex,
        held: HeldBlocks,
        ranks: int,
        *,
        has_groups: bool,
        is_write_through: bool,
    ) -> None:
        """
        Args:
            ranks: that report the end of each copy.
            has_groups: the model has several cache groups.
        """
        self._pool, self._index, self._held, self._ranks = pool, index, held, ranks
        self._has_groups, self._is_write_through = has_groups, is_write_through
        self._now_s = default_clock().now_s
        self._numbers = itertools.count()
        self._turns: dict[str, _Turn] = {}
        self._due: dict[str, None] = {}  # in this order
        self._stores: dict[int, _Store] = {}
        self._orders: dict[int, BlockCopy] = {}
        self.settled: list[str] = []
        self.demotions: list[str] = []

    def __bool__(self) -> bool:
        return bool(self._due or self._stores)

    def finished(self, request: Request, block_ids: tuple[list[int], ...]) -> None:
        table = self._pool.blocks
        sources = [
            (block, hashes)
            for ids in block_ids
            for block in (table[i] for i in ids)
            for hashes in [hooks.hashes_of(self._pool, block)]
            if hashes[0]
        ]
        if sources:
            self._turns[request.request_id] = _Turn(sources, self._now_s())
            if self._is_write_through:
                self._due[request.request_id] = None

    def report_turn(self, turn: TurnEnd) -> None:
        if turn.ttl_s is None:
            self.drop(turn.request_id)
            if turn.program is not None:
                self._index.drop_program(turn.program)
                for store in self._stores.values():
                    store.is_dropped |= store.turn.program == turn.program
            return
        pending = self._turns.get(turn.request_id)
        if pending is not None:
            pending.program = turn.program
            pending.deadline_s = self._now_s() + turn.ttl_s

    def has_unstored(self, request_id: str) -> bool:
        return request_id in self._turns

    def demote(self, request_id: str) -> bool:
        if request_id not in self._turns:
            return False
        self._due.setdefault(request_id)
        return True

    def drop(self, request_id: str) -> None:
        self._turns.pop(request_id, None)
        self._due.pop(request_id, None)

    def references(self) -> dict[int, int]:
        return self._held.counts

    def order(self) -> dict[int, BlockCopy]:
        """The copies that are due, by a number of their own."""
        while self._due:
            request_id = next(iter(self._due))
            del self._due[request_id]
            self.settled.append(request_id)
            store = self._begin(request_id, self._turns.pop(request_id))
            if not store.missing:
                self._end(store)
                continue
            number = next(self._numbers)
            self._stores[number] = store
            self._orders[number] = BlockCopy(
                [source.block_id for source, _ in store.missing],
                [target.block_id for target in store.targets],
            )
        orders, self._orders = self._orders, {}
        return orders

    def on_report(self, report: CopyReport) -> None:
        """What ended on the ranks."""
        for number, ranks in report.stored.items():
            store = self._stores.get(number)
            if store is None:
                continue
            store.ranks_left -= ranks
            store.has_failed |= number in report.failed
            if store.ranks_left <= 0:
                self._end(self._stores.pop(number))

    def reset(self) -> None:
        """What is in GPU memory, or on its way down, is worthless."""
        self._turns.clear()
        self._due.clear()
        for store in self._stores.values():
            store.is_dropped = True

    def _begin(self, request_id: str, turn: _Turn) -> _Store:
        """Copy what is not there yet and still in GPU memory."""
        kept: list[KVCacheBlock] = []
        missing: list[tuple[KVCacheBlock, hooks.BlockHashes]] = []
        for source, hashes in turn.sources:
            there = self._index.block_of(hashes)
            if there is not None:
                kept.append(there)
            elif source.block_hash == hashes[0][0]:
                missing.append((source, hashes))
            elif not self._has_groups:
                break  # a hit ends here
        self._index.lock(kept)
        wanted = len(missing)
        if self._has_groups and wanted > self._index.count_obtainable():
            wanted = 0  # a part of one group's blocks is a hit for none
        targets = self._index.take_free(wanted)
        partial = len(kept) + len(targets) < len(turn.sources)
        missing = missing[: len(targets)]
        self._held.hold([source for source, _ in missing])
        return _Store(request_id, turn, missing, targets, kept, self._ranks, partial)

    def _end(self, store: _Store) -> None:
        """Every rank has copied: the turn can be found from now on."""
        self._held.release([source for source, _ in store.missing])
        if store.has_failed or store.is_dropped:
            self.demotions.append("failed" if store.has_failed else "dropped")
            self._index.unlock([*store.kept, *store.targets])
            return
        self.demotions.append("dropped" if store.is_partial else "stored")
        blocks = store.kept
        for target, (_, hashes) in zip(store.targets, store.missing, strict=True):
            blocks.append(self._index.set_content(target, hashes))
        turn = StoredTurn(store.turn.program, store.turn.deadline_s, blocks)
        self._index.keep(store.request_id, turn)
