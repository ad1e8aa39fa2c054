"""Turns without a pin above a lower tier, whose blocks stay referenced all the same.

Such a turn's pin is over, by its deadline or for a waiting request, or it was not worth
one. `demote: on-pressure` keeps it until memory gets short: most of what returns late
returns before that, and is never copied. Then, or at once with `on-expiry`, its copy
is ordered; its blocks stay until the tier has references of its own.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ttlcache.clock import Clock
from ttlcache.programs.model import Program
from ttlcache_connector.blocks.pinned import count_down, free_tail_first, ids_of
from ttlcache_connector.tiers.base import TierDemotions

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

#: So long a waiting request lets a copy take before it takes the blocks.
COPY_WAIT_S = 0.25


@dataclass(frozen=True, slots=True)
class LingeringTurn:
    """A turn whose blocks stay until memory is short.

    free_blocks: its blocks that were used by nothing else when it came. Later users of
        some of them (another program with the same prompt) are not subtracted.
    """

    request_id: str
    program: Program
    blocks: list[KVCacheBlock]
    free_blocks: int


class LingeringTurns:
    """Turns whose copy is not begun, oldest first."""

    def __init__(self) -> None:
        self._turns: dict[str, LingeringTurn] = {}
        #: Blocks that would be free without them.
        self.free_blocks = 0

    def __len__(self) -> int:
        return len(self._turns)

    def __iter__(self) -> Iterator[LingeringTurn]:
        return iter(self._turns.values())

    def add(self, turn: LingeringTurn) -> None:
        assert turn.request_id not in self._turns
        self._turns[turn.request_id] = turn
        self.free_blocks += turn.free_blocks

    def pop(self, request_id: str) -> list[KVCacheBlock]:
        """The turn goes; its blocks, none if it was not here."""
        turn = self._turns.pop(request_id, None)
        if turn is None:
            return []
        self.free_blocks -= turn.free_blocks
        return turn.blocks

    def by_age(self) -> Iterator[LingeringTurn]:
        """Oldest first, those of programs whose next turn waits after all others."""
        turns = list(self._turns.values())
        yield from (turn for turn in turns if not turn.program.live_requests)
        yield from (turn for turn in turns if turn.program.live_requests)

    def of(self, program: Program) -> list[LingeringTurn]:
        return [turn for turn in self._turns.values() if turn.program is program]


@dataclass(slots=True)
class _Copy:
    """A copy that the tier was told of and has not ordered yet.

    due_s: when a waiting request may take the blocks all the same.
    """

    blocks: list[KVCacheBlock]
    due_s: float


class UnpinnedTurns:
    """References on the blocks of turns without a pin, until they are copied or go."""

    def __init__(
        self,
        pool: BlockPool,
        demotions: TierDemotions,
        clock: Clock,
        count: Callable[[str, str], None],
        *,
        copies_at_once: bool,
    ) -> None:
        """
        Args:
            copies_at_once: not only when memory is short.
            count: counts a metric by name and label.
        """
        self._pool = pool
        self._demotions, self._count = demotions, count
        self._clock = clock
        self._copies_at_once = copies_at_once
        self.refs: Counter[int] = Counter()  # by block id
        self.lingering = LingeringTurns()
        self._awaited: dict[str, _Copy] = {}  # oldest first

    @property
    def awaiting_copy_blocks(self) -> int:
        """Blocks that wait for their copy."""
        return sum(len(copy.blocks) for copy in self._awaited.values())

    @property
    def lingering_blocks(self) -> int:
        return sum(len(turn.blocks) for turn in self.lingering)

    def __len__(self) -> int:
        return len(self.lingering) + len(self._awaited)

    # --- turns come ------------------------------------------------------

    def keep(
        self,
        request_id: str,
        program: Program,
        blocks: list[KVCacheBlock],
        users: int = 0,
    ) -> int:
        """Keep a turn's blocks cached, whose references are ours from now on.

        Args:
            users: requests that use them now, and are about to give that up.

        Returns:
            Blocks that became free.
        """
        self._unref(self.lingering.pop(request_id))  # an id that is used again
        self.refs.update(ids_of(blocks))
        own = any(self.refs[i] == 1 for i in ids_of(reversed(blocks)))
        if self._copies_at_once or not own:
            # To wait gains nothing where others that are cached have it all.
            return self._copy(request_id, blocks)
        refs = self.refs  # each block counts once
        alone = sum(b.ref_cnt == 1 + users and refs[b.block_id] == 1 for b in blocks)
        self.lingering.add(LingeringTurn(request_id, program, blocks, alone))
        return 0

    def copy(self, request_id: str, blocks: list[KVCacheBlock]) -> int:
        """Copy a turn; `blocks`, whose references are ours now, stay until the order.

        Returns:
            Blocks that are free, or will be soon.
        """
        self.refs.update(ids_of(blocks))
        alone = self._count_alone(blocks)
        self._copy(request_id, blocks)
        return alone

    def _copy(self, request_id: str, blocks: list[KVCacheBlock]) -> int:
        """Tell the tier, keep the blocks for it; returns those that became free."""
        try:
            is_copied = self._demotions.demote(request_id)
        except Exception:
            self._unref(blocks)
            raise
        if not is_copied:
            return self._unref(blocks)
        copy = self._awaited.get(request_id)
        if copy is None:
            due_s = self._clock.now_s() + COPY_WAIT_S
            self._awaited[request_id] = _Copy(blocks, due_s)
        else:  # these come before those of the turn that were given up earlier
            copy.blocks = blocks + copy.blocks
        return 0

    # --- turns go --------------------------------------------------------

    def on_releasable(self, request_id: str) -> int:
        """The tier holds what was to be copied, or does not want it any more."""
        if not self._demotions.can_be_demoted(request_id):
            return self.drop(request_id)
        return self._unref(self._pop_copy(request_id))

    def drop(self, request_id: str) -> int:
        """Nobody comes back to the turn; returns blocks that became free."""
        self._demotions.drop(request_id)
        return self.release(request_id)

    def on_program_resumed(self, program: Program) -> None:
        """A turn of the program was allocated: the blocks it hit are not demoted.

        It offers the same to the tier when it ends, with its own.
        """
        for turn in self.lingering.of(program):
            # Another branch of the program may have found no more than its beginning.
            copy = self._awaited.get(turn.request_id)
            tail = (copy.blocks if copy else turn.blocks)[-1]
            if tail.ref_cnt > self.refs[tail.block_id]:
                self.drop(turn.request_id)

    def release(self, request_id: str) -> int:
        """What is held of the turn goes, whatever it was; returns blocks freed."""
        return self._unref(self._pop_copy(request_id) + self.lingering.pop(request_id))

    def drop_all(self) -> None:
        """Nothing is kept for a copy: a reset, a shutdown, a fault.

        Memory first: what failed may be the tier.
        """
        turns = [*self._awaited, *(turn.request_id for turn in self.lingering)]
        for request_id in turns:
            self.release(request_id)
        with contextlib.ExitStack() as drops:  # one that raises keeps no other
            for request_id in reversed(turns):
                drops.callback(self._demotions.drop, request_id)
            drops.callback(self._demotions.drop_copies)

    # --- memory is short -------------------------------------------------

    def soon_free(self) -> int:
        """Blocks that a waiting request should wait for."""
        now_s, table = self._clock.now_s(), self._pool.blocks
        copies = self._awaited.values()
        awaited = sum(len(copy.blocks) for copy in copies if copy.due_s > now_s)
        copied = sum(
            table[block_id].ref_cnt == count
            for block_id, count in self._demotions.references().items()
        )
        return awaited + copied

    def free(self, needed_blocks: int, *, at_once: bool) -> int:
        """Free blocks of these turns.

        Args:
            at_once: also before their copy, which a waiting request should wait for.

        Returns:
            Blocks that became free.
        """
        freed = self._stop_awaiting_copies(needed_blocks, timed_out=True)
        if not at_once:
            return freed + self._make_room(needed_blocks - freed)
        for turn in self.lingering.by_age():
            if freed >= needed_blocks:
                return freed
            if self._count_alone(turn.blocks):
                freed += self._give(turn)
        return freed + self._stop_awaiting_copies(
            needed_blocks - freed, timed_out=False
        )

    def references(self) -> Counter[int]:
        """From the tables, so that the invariant checker sees what they have lost."""
        counts: Counter[int] = Counter()
        for copy in self._awaited.values():
            counts.update(ids_of(copy.blocks))
        for turn in self.lingering:
            counts.update(ids_of(turn.blocks))
        counts.update(self._demotions.references())
        return counts

    def _make_room(self, blocks: int) -> int:
        """Begin to copy lingering turns until so many blocks are free soon.

        Returns:
            Blocks that became free at once.
        """
        lack, freed = blocks - self.soon_free(), 0
        for turn in self.lingering.by_age() if lack > 0 else ():
            if lack <= 0:
                break
            if not self._count_alone(turn.blocks):
                continue  # others use it all: nothing would become free
            # What other turns share comes free with the last of them.
            lack -= sum(b.ref_cnt == 1 for b in turn.blocks)
            if turn.program.ended:
                freed += self.drop(turn.request_id)
            else:
                self.lingering.pop(turn.request_id)
                freed += self._copy(turn.request_id, turn.blocks)
        return freed

    def _give(self, turn: LingeringTurn) -> int:
        """A lingering turn's memory, at once."""
        if turn.program.ended:
            return self.drop(turn.request_id)
        self.lingering.pop(turn.request_id)
        try:
            self._demotions.demote(turn.request_id)
        finally:
            freed = self._unref(turn.blocks)
        return freed

    def _stop_awaiting_copies(self, needed_blocks: int, *, timed_out: bool) -> int:
        now_s, freed = self._clock.now_s(), 0
        for request_id, copy in list(self._awaited.items()):
            if freed >= needed_blocks:
                break
            if not timed_out or copy.due_s <= now_s:
                freed += self._unref(self._pop_copy(request_id))
                self._count("demotions", "dropped")
        return freed

    def _count_alone(self, blocks: Sequence[KVCacheBlock]) -> int:
        """How many of these blocks nothing but unpinned turns references."""
        return sum(b.ref_cnt == self.refs[b.block_id] for b in blocks)

    def _pop_copy(self, request_id: str) -> list[KVCacheBlock]:
        copy = self._awaited.pop(request_id, None)
        return [] if copy is None else copy.blocks

    def _unref(self, blocks: list[KVCacheBlock]) -> int:
        count_down(self.refs, blocks)
        return free_tail_first(self._pool, blocks)
