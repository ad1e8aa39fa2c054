"""Turns that ended above a lower tier, until it has taken them over.

The pin is over for the core; here its references stay until the tier has its own (it
holds them while it copies), or until a request needs the memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ttlcache.clock import Clock
from ttlcache.programs.model import Program
from ttlcache.types import Pressure
from ttlcache_connector.blocks.lingering import Lingering, Turn
from ttlcache_connector.blocks.pending_copies import PendingCopies
from ttlcache_connector.blocks.pinned import PinnedBlocks, ids_of
from ttlcache_connector.tiers.base import SchedulerTier

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock


class EndedTurns(PinnedBlocks):
    """A pin ledger that keeps ended turns, too: lingering, or about to be copied."""

    def __init__(
        self,
        pool: BlockPool,
        group_block_tokens: Sequence[int],
        queue_counts: Callable[[], tuple[int, int]],
        *,
        tier: SchedulerTier,
        clock: Clock,
        room_blocks: int = 0,
    ) -> None:
        """
        Args:
            room_blocks: how many blocks to keep free, or about to be, by copying
                turns that linger; 0: nothing lingers, copies begin at once.
        """
        super().__init__(pool, group_block_tokens, queue_counts)
        self._tier = tier
        self._room_blocks = room_blocks
        self._lingering = Lingering()
        self._copies = PendingCopies(clock.now_s)

    @property
    def demoting_blocks(self) -> int:
        return len(self._copies.blocks)

    @property
    def lingering_blocks(self) -> int:
        return self._lingering.blocks

    @property
    def demotes_parts(self) -> bool:
        """Whether a turn may be in the tier in part and in GPU memory in part.

        Not where nothing lingers: other engines that read the tier have no use for a
        suffix.
        """
        return bool(self._room_blocks) and self._tier.stores_suffixes

    def on_settled(self, request_id: str) -> int:
        """The tier holds what was to be copied, or does not want it any more."""
        if not self._tier.has_unstored(request_id):
            return self._drop_turn(request_id)
        return self._unref(self._copies.pop(request_id))

    def _drop_turn(self, request_id: str) -> int:
        """Nobody comes back to the turn; returns blocks that became free."""
        self._tier.drop(request_id)
        return self._unref(self._take(request_id))

    def _take(self, request_id: str) -> list[KVCacheBlock]:
        """What is held of an ended turn leaves the tables."""
        return self._copies.pop(request_id) + self._lingering.pop(request_id)

    def on_program_resumed(self, program: Program) -> None:
        """A turn of the program was allocated: the blocks it hit are not demoted.

        It offers the same to the tier when it ends, with its own.
        """
        for turn in self._lingering.of(program):
            # Another branch of the program may have found no more than its beginning.
            tail = (self._copies.of(turn.request_id) or turn.blocks)[-1]
            if tail.ref_cnt > self._ended_refs[tail.block_id]:
                self._drop_turn(turn.request_id)

    def soon_free(self) -> int:
        """Blocks that a waiting request should wait for."""
        table = self.pool.blocks
        copied = sum(
            table[block_id].ref_cnt == count
            for block_id, count in self._tier.references().items()
        )
        return self._copies.awaited_blocks + copied

    @property
    def holds_any(self) -> bool:
        return bool(self._held or self._copies or self._lingering)

    def drop_all(self) -> int:
        before = self.pool.get_num_free_blocks()
        super().drop_all()
        # Memory first: what failed may be the tier.
        ended = [*self._copies, *(turn.request_id for turn in self._lingering)]
        for request_id in ended:
            self._unref(self._take(request_id))
        failed: Exception | None = None
        for request_id in ended:
            try:
                self._tier.drop(request_id)
            except Exception as error:  # noqa: BLE001 - the others are dropped, too
                failed = error
        if failed is not None:
            raise failed
        return int(self.pool.get_num_free_blocks() - before)

    def release_demoting(self) -> None:
        """Reset, shutdown: nothing is kept for a copy."""
        for request_id in [*self._copies, *(t.request_id for t in self._lingering)]:
            self._drop_turn(request_id)

    def references(self) -> dict[int, int]:
        counts = Counter(super().references())
        # From the tables, so that the invariant checker sees what they have lost.
        counts.update(ids_of(self._copies.blocks))
        for turn in self._lingering:
            counts.update(ids_of(turn.blocks))
        counts.update(self._tier.references())
        return dict(counts)

    def pressure(self) -> Pressure:
        pressure = super().pressure()
        free = pressure.free_blocks + self._lingering.free_blocks
        most = pressure.pool_blocks - pressure.pinned_blocks
        return pressure._replace(free_blocks=min(free, most))

    def _plain_free_blocks(self) -> int:
        free = super()._plain_free_blocks() + len(self._ended_refs)
        return min(free, self.pool_blocks)

    def _keep(
        self,
        request_id: str,
        program: Program,
        blocks: list[KVCacheBlock],
        users: int = 0,
        first: int = 0,
    ) -> int:
        """Ended, referenced, to be copied; returns blocks that became free.

        users: requests that reference them now, and are about to give that up.
        first: the turn's blocks before these, which its pin holds.
        """
        self._unref(self._lingering.pop(request_id))  # an id that is used again
        own = any(self._ended_refs[i] == 1 for i in ids_of(reversed(blocks)))
        if not self._room_blocks or not own:
            # To wait gains nothing where others that linger have it all.
            return self._copy(request_id, blocks, first)
        refs = self._ended_refs  # each block counts once
        alone = sum(b.ref_cnt == 1 + users and refs[b.block_id] == 1 for b in blocks)
        self._lingering.add(Turn(request_id, program, blocks, alone, first))
        return 0

    def _ends(self, blocks: Sequence[KVCacheBlock]) -> None:
        """A pin's references become those of an ended turn."""
        self._count_down(self._refs, blocks)
        self._ended_refs.update(ids_of(blocks))

    def _alone(self, blocks: Sequence[KVCacheBlock]) -> int:
        """How many of these only ended turns reference."""
        refs = self._ended_refs
        return sum(b.ref_cnt == refs[b.block_id] for b in blocks)

    def _cut(self, blocks: Sequence[KVCacheBlock], lack: int) -> int:
        """From which of these on they are demoted, if `lack` of them are needed."""
        if not self.demotes_parts:
            return 0
        for cut in range(len(blocks) - 1, 0, -1):
            lack -= blocks[cut].ref_cnt == self._ended_refs[blocks[cut].block_id]
            if lack <= 0:
                return cut
        return 0

    def _copy(
        self,
        request_id: str,
        blocks: list[KVCacheBlock],
        first: int = 0,
        *,
        alone: bool = True,
    ) -> int:
        """Begin the copy, keep the blocks for it; returns those that became free.

        first: how many of the turn's blocks stand before these.
        alone: those are not copied.
        """
        try:
            begin = self._demote(request_id, first if alone else 0)
        except Exception:
            self._unref(blocks)
            raise
        if begin is None:
            return self._unref(blocks)
        # What the tier has already waits for nothing.
        known = max(0, begin - first) if self.is_divisible else 0
        self._copies.add(request_id, blocks[known:])
        return self._unref(blocks[:known])

    def _unref(self, blocks: list[KVCacheBlock]) -> int:
        return self._drop(blocks, self._ended_refs)

    def _demote(self, request_id: str, first: int) -> int | None:
        """From which block on it is copied; None: not at all."""
        size = self._group_block_tokens[0]
        begin = self._tier.demote(request_id, first * size)
        return None if begin is None else begin // size
