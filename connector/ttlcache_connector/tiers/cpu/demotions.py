"""Finished turns on their way to host memory.

Blocks of a copy, on both sides, are referenced from its order until every rank has
reported its end: nothing else can take them meanwhile. Once a store is dropped, only
its blocks in host memory are.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from ttlcache.clock import default_clock
from ttlcache_connector.engine import vllm_internals
from ttlcache_connector.tiers.base import TierDemotions, TurnEnd
from ttlcache_connector.tiers.cpu.index import HeldBlocks, HostIndex, StoredTurn
from ttlcache_connector.tiers.cpu.messages import BlockCopy, CopyReport

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request

#: A direction of which no copy ends for so long is stalled.
COPY_TIMEOUT_S = 10.0
#: Blocks of turns that are looked at in a step; what else is due waits for the next.
BLOCKS_A_STEP = 8_192

K = TypeVar("K", bound="int | str")
C = TypeVar("C")


class Copies(dict[K, C]):
    """Copies of one direction under way, by key, in the order of their begin.

    is_stalled: one has not ended in time; until all have, no other should begin.
    """

    def __init__(self, ranks: int) -> None:
        """
        Args:
            ranks: that report the end of each copy.
        """
        super().__init__()
        self._ranks, self._now_s = ranks, default_clock().now_s
        self._ended_on: Counter[K] = Counter()
        self._failed: set[K] = set()
        self._waits_since_s, self._late_reports = 0.0, 0
        self.is_stalled = False

    def begin(self, key: K, copy: C) -> None:
        if not self:
            self._waits_since_s = self._now_s()
        self[key] = copy

    def take_ended(self, report: CopyReport) -> list[tuple[K, C, bool]]:
        """Key, copy and success of those that every rank has ended."""
        ended = []
        for key in [key for key in self if key in report.ended]:
            self._waits_since_s = self._now_s()
            self._ended_on[key] += report.ended[key]
            if key in report.failed:
                self._failed.add(key)
            if self._ended_on[key] >= self._ranks:
                ended.append((key, self.pop(key), key not in self._failed))
                self._failed.discard(key)
                del self._ended_on[key]
        is_late = self._now_s() - self._waits_since_s > COPY_TIMEOUT_S
        # The first report after a long step may be of the step before it.
        self._late_reports = self._late_reports + 1 if is_late else 0
        self.is_stalled = bool(self) and (self.is_stalled or self._late_reports > 1)
        return ended


@dataclass(slots=True)
class _Turn:
    """A finished request that may be demoted.

    sources: block and its hash; one that others have overwritten has another by now.
    """

    sources: list[tuple[KVCacheBlock, Any]]
    deadline_s: float
    program: str | None = None


@dataclass(slots=True)
class _Store:
    """A turn's copy down.

    missing: what is copied, as far as there is room for it.
    kept: what was there before, by its hash.
    hashes: of what this store alone brings.
    relies_on_others: the rest is on its way in other stores.
    """

    request_id: str
    turn: _Turn
    missing: list[tuple[KVCacheBlock, vllm_internals.BlockHashes]]
    targets: list[KVCacheBlock]
    kept: dict[Any, KVCacheBlock]
    hashes: list[Any]
    relies_on_others: bool
    is_dropped: bool = False


class CPUDemotions(TierDemotions):
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
            ranks: worker processes, each of which copies its share.
            has_groups: the model has several cache groups.
        """
        self._pool, self._index, self._held = pool, index, held
        self._has_groups, self._is_write_through = has_groups, is_write_through
        self._now_s = default_clock().now_s
        self._numbers = itertools.count()
        self._turns: dict[str, _Turn] = {}
        self.due: dict[str, None] = {}  # to be ordered, in this order
        self.copies: Copies[int, _Store] = Copies(ranks)
        self._store_of: dict[Any, _Store] = {}  # under way, by a block's hash
        self._orders: dict[int, BlockCopy] = {}
        self.releasable: list[str] = []
        self.outcomes: list[str] = []

    def __bool__(self) -> bool:
        return bool(self.due or self.copies)

    def on_finished(self, request: Request, block_ids: tuple[list[int], ...]) -> None:
        table = self._pool.blocks
        sources = [
            (block, block.block_hash)
            for ids in block_ids
            for block in (table[i] for i in ids)
            if block.block_hash is not None and not block.is_null
        ]
        if sources:
            self._turns[request.request_id] = _Turn(sources, self._now_s())
            if self._is_write_through:
                self.due[request.request_id] = None

    def report_turn(self, turn: TurnEnd) -> None:
        if turn.ttl_s is None:
            self.drop(turn.request_id)
            if turn.program is not None:
                self._index.drop_program(turn.program)
                for store in self.copies.values():
                    store.is_dropped |= store.turn.program == turn.program
            return
        pending = self._turns.get(turn.request_id)
        if pending is not None:
            pending.program = turn.program
            pending.deadline_s = self._now_s() + turn.ttl_s

    def can_be_demoted(self, request_id: str) -> bool:
        return request_id in self._turns

    def demote(self, request_id: str) -> bool:
        if request_id not in self._turns:
            return False
        self.due.setdefault(request_id)
        return True

    def drop(self, request_id: str) -> None:
        self._turns.pop(request_id, None)
        self.due.pop(request_id, None)

    def references(self) -> dict[int, int]:
        return self._held.counts

    def order(self, unwritten: set[int], *, is_up: bool) -> dict[int, BlockCopy]:
        """The copies that are due, by a number of their own.

        unwritten: blocks whose content is not there yet.
        is_up: others may begin; without that what is due is dropped.
        """
        num_blocks = 0
        while self.due and num_blocks < BLOCKS_A_STEP:
            request_id = next(iter(self.due))
            del self.due[request_id]
            self.releasable.append(request_id)
            turn = self._turns.pop(request_id)
            if not is_up:
                self.outcomes.append("dropped")
                continue
            num_blocks += len(turn.sources)
            store = self._begin(request_id, turn, unwritten)
            if not store.missing:
                self._end(store, is_ok=True)
                continue
            number = next(self._numbers)
            self.copies.begin(number, store)
            self._orders[number] = BlockCopy(
                [source.block_id for source, _ in store.missing],
                [target.block_id for target in store.targets],
            )
        orders, self._orders = self._orders, {}
        return orders

    def on_report(self, report: CopyReport) -> None:
        """What ended on the ranks."""
        for _, store, is_ok in self.copies.take_ended(report):
            self._end(store, is_ok=is_ok)
        if self.copies.is_stalled:
            self.drop_copies()

    def drop_copies(self, needed_blocks: int | None = None) -> int:
        free = self._pool.get_num_free_blocks
        before = free()
        for store in reversed(list(self.copies.values())):
            sources = [source for source, _ in store.missing]
            if needed_blocks is not None and free() - before >= needed_blocks:
                break
            counts = self._held.counts
            is_shared = all(s.ref_cnt > counts[s.block_id] for s in sources)
            if needed_blocks is not None and is_shared:
                continue
            store.is_dropped = True
            self._held.release(sources)
            store.missing = []
        return int(free() - before)

    def reset(self) -> None:
        """What is in GPU memory, or on its way down, is worthless."""
        self._turns.clear()
        self.due.clear()
        self.drop_copies()

    def _begin(self, request_id: str, turn: _Turn, unwritten: set[int]) -> _Store:
        """Copy what is not there yet, nor on its way, and still in GPU memory."""

        def can_be_copied(source: KVCacheBlock, block_hash: Any) -> bool:
            has_it = source.block_hash == block_hash
            return has_it and source.block_id not in unwritten

        kept: dict[Any, KVCacheBlock] = {}
        wanted: list[KVCacheBlock] = []
        coming: list[tuple[KVCacheBlock, Any]] = []
        is_whole = True
        for source, block_hash in turn.sources:
            there = self._index.block_of(block_hash)
            other = self._store_of.get(block_hash)
            if there is not None:
                kept[block_hash] = there
            elif other is not None and not other.is_dropped:
                coming.append((source, block_hash))
            elif can_be_copied(source, block_hash):
                wanted.append(source)
            else:
                is_whole = False
                if not self._has_groups:
                    break  # a hit ends here
        if coming and not wanted and can_be_copied(*coming[-1]):
            # Its end is behind those of the others that bring the rest.
            wanted = [coming[-1][0]]
        self._index.lock(list(kept.values()))
        if self._has_groups and not (
            is_whole and len(wanted) <= self._index.count_obtainable()
        ):
            wanted = []  # a part of one group's blocks is a hit for none
        targets = self._index.make_room(len(wanted))
        wanted = wanted[: len(targets)]
        self._held.hold(wanted)
        hashes_of = vllm_internals.hashes_of
        missing = [(source, hashes_of(self._pool, source)) for source in wanted]
        brought = [hashes[0][0] for _, hashes in missing]
        store = _Store(request_id, turn, missing, targets, kept, brought, bool(coming))
        self._store_of.update(dict.fromkeys(brought, store))
        return store

    def _end(self, store: _Store, *, is_ok: bool) -> None:
        """Every rank has copied: the turn can be found from now on."""
        for block_hash in store.hashes:
            if self._store_of.get(block_hash) is store:
                del self._store_of[block_hash]
        self._held.release([source for source, _ in store.missing])
        if store.is_dropped or not is_ok:
            self.outcomes.append("dropped" if is_ok else "failed")
            self._index.unlock([*store.kept.values(), *store.targets])
            return
        there = store.kept
        for target, (_, hashes) in zip(store.targets, store.missing, strict=True):
            (block_hash, *_), _ = hashes
            there[block_hash] = self._index.set_content(target, hashes)
        blocks = []
        for _, block_hash in store.turn.sources:
            block = there.get(block_hash)
            if block is None:
                block = self._index.block_of(block_hash)  # brought by another
                if block is None:
                    continue
                self._index.lock([block])
            blocks.append(block)
        is_partial = len(blocks) < len(store.turn.sources)
        is_id_free = store.request_id not in self._turns  # clients may use it again
        if is_partial and store.relies_on_others and is_id_free:
            # One of those was dropped: once more, of what is still in GPU memory.
            self._turns[store.request_id] = store.turn
            self.due[store.request_id] = None
        else:
            self.outcomes.append("dropped" if is_partial else "stored")
        turn = StoredTurn(store.turn.program, store.turn.deadline_s, blocks)
        self._index.keep(store.request_id, turn)
