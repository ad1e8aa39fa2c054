"""Pins whose blocks go to a lower tier when they end before their turn comes back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ttlcache.programs.model import Program
from ttlcache.retention.decisions import MAX_ALIKE
from ttlcache.types import PinOutcome, Pressure, ReleaseMode, Shrunk
from ttlcache_connector.blocks.pinned import PinnedBlocks, ids_of
from ttlcache_connector.blocks.unpinned_turns import UnpinnedTurns
from ttlcache_connector.tiers.base import TierDemotions, TurnEnd, program_name

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

    from ttlcache_connector.blocks.recurrent_states import RecurrentStates

#: Outcomes of pins whose turn may still be continued.
_COMES_BACK = frozenset({PinOutcome.EXPIRED, PinOutcome.VICTIM})

#: A pin that lost less than this share of its turn is not copied: the whole turn would
#: move, five bytes for each one lost.
UNCOPIED_SHARE = 0.2


class _PinnedTurn(NamedTuple):
    """blocks: that it had when it was pinned."""

    request_id: str
    program: Program
    blocks: int


class PinsAboveTier(PinnedBlocks):
    """As pins end: which of their blocks are copied, kept or freed."""

    def __init__(
        self,
        pool: BlockPool,
        group_block_tokens: Sequence[int],
        queue_counts: Callable[[], tuple[int, int]],
        unpinned: UnpinnedTurns,
        demotions: TierDemotions,
        report_turn: Callable[[TurnEnd], None],
        states: RecurrentStates | None = None,
    ) -> None:
        super().__init__(pool, group_block_tokens, queue_counts, unpinned.refs, states)
        self.unpinned = unpinned
        self._demotions, self._report_turn = demotions, report_turn
        self._turn_of: dict[int, _PinnedTurn] = {}  # by pin id

    def on_pinned(self, pin_id: int, request_id: str, program: Program) -> None:
        """The pin holds what this request computed."""
        self.unpinned.release(request_id)  # an id that is used again
        blocks = len(self.blocks_by_pin[pin_id])
        self._turn_of[pin_id] = _PinnedTurn(request_id, program, blocks)

    def on_client_ended_program(self, program: Program) -> None:
        """The tier may forget it, also where no turn of it is pinned any more."""
        name = program_name(program)
        self._report_turn(TurnEnd(f"end of {name}", name))

    def on_finished_unpinned(
        self, request_id: str, program: Program, blocks: Sequence[KVCacheBlock]
    ) -> None:
        """A turn that may be continued, but that is not worth a pin."""
        self.unpinned.release(request_id)  # an id that is used again
        # With several cache groups one that goes on holds not all of its windows.
        ends = blocks[-1:] if self.is_divisible else blocks
        turns = [self._refs[i] + self.unpinned.refs[i] for i in ids_of(ends)]
        if min(turns, default=MAX_ALIKE) >= MAX_ALIKE:
            self._demotions.drop(request_id)  # it has none, or is copied with others
        elif not self._demotions.can_be_demoted(request_id):
            self._demotions.drop(request_id)  # an outage: it would stay queued for ever
        else:
            self.pool.touch(blocks)
            # The request that computed them gives up its references right after this.
            self.unpinned.keep(request_id, program, list(blocks), users=1)

    def release(self, pin_id: int, outcome: PinOutcome, mode: ReleaseMode) -> int:
        turn = self._turn_of.pop(pin_id, None)
        if turn is None:
            return super().release(pin_id, outcome, mode)
        if outcome is PinOutcome.ENDED:
            self._report_turn(TurnEnd(turn.request_id, program_name(turn.program)))
        if outcome not in _COMES_BACK:
            freed = self.unpinned.drop(turn.request_id)
            return freed + super().release(pin_id, outcome, mode)
        if not self._demotions.can_be_demoted(turn.request_id):
            return super().release(pin_id, outcome, mode)
        if mode is ReleaseMode.FREE_NOW:
            try:  # what is not overwritten in this step is copied
                self._demotions.demote(turn.request_id)
            finally:
                freed = super().release(pin_id, outcome, mode)
            return freed
        blocks = self.detach(pin_id)
        if mode is ReleaseMode.COPY_FIRST:
            return self.unpinned.copy(turn.request_id, blocks)
        return self.unpinned.keep(turn.request_id, turn.program, blocks)

    def shrink(self, pin_id: int, drop_blocks: int, mode: ReleaseMode) -> Shrunk | None:
        """Drop references from the tail.

        With `COPY_FIRST` the whole turn is copied on its first loss; later ones free at
        once. A loss of less than `UNCOPIED_SHARE` is not copied, but recomputed.
        """
        turn = self._turn_of.get(pin_id)
        keep = len(self.blocks_by_pin.get(pin_id, ())) - max(0, drop_blocks)
        if (
            mode is not ReleaseMode.COPY_FIRST
            or turn is None
            or not self.is_divisible
            or not 0 < keep <= turn.blocks * (1 - UNCOPIED_SHARE)
            or not self._demotions.can_be_demoted(turn.request_id)
        ):
            return super().shrink(pin_id, drop_blocks, mode)
        tail = self.detach(pin_id, keep)
        soon_free = self.unpinned.copy(turn.request_id, tail)
        return Shrunk(soon_free, keep, keep * self._group_block_tokens[0])

    def pressure(self) -> Pressure:
        """Lingering turns count as free."""
        pressure = super().pressure()
        free = pressure.free_blocks + self.unpinned.lingering.free_blocks
        most = pressure.pool_blocks - pressure.pinned_blocks
        return pressure._replace(free_blocks=min(free, most))

    def references(self) -> dict[int, int]:
        """All of ours per block id, for the invariant checker."""
        counts = Counter(super().references())  # this is the fast way round
        counts.update(self.unpinned.references())
        return counts

    def drop_all(self) -> int:
        self._turn_of.clear()
        before = self.pool.get_num_free_blocks()
        super().drop_all()
        self.unpinned.drop_all()
        return int(self.pool.get_num_free_blocks() - before)
