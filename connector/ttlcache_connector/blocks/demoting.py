"""Pins that end but whose blocks are still to be copied to the lower tier.

Which blocks of a turn are copied, when, and which give way first. With `demote:
on-pressure` a copy begins only when room gets short: see `lingering`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from ttlcache.programs.model import Program
from ttlcache.types import PinOutcome, ReleaseMode, Shrunk
from ttlcache_connector.blocks.ended_turns import EndedTurns
from ttlcache_connector.blocks.lingering import Turn
from ttlcache_connector.blocks.pinned import ids_of
from ttlcache_connector.tiers.base import TurnEnd
from ttlcache_connector.tiers.turn_report import pin_end

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

#: Outcomes of pins whose turn may still be continued.
_COMES_BACK = frozenset({PinOutcome.EXPIRED, PinOutcome.VICTIM})

#: A pin that gave up no more of its turn is not copied for that where the tier finds
#: nothing without all that stands before it: five bytes would move for each one saved.
UNCOPIED_SHARE = 0.2

#: Blocks of a pin that are copied ahead at a time: to copy costs a message to the tier,
#: however little it is.
LEAST_PIECE = 8

#: Lingering turns of which the cheapest goes first.
COMPARED = 32


class _PinnedTurn(NamedTuple):
    """blocks: that it had when it was pinned."""

    request_id: str
    program: Program
    blocks: int


class _Cost(NamedTuple):
    """Cost of freeing a turn's end.

    is_awaited: a next turn of its program is in the queue.
    tokens: to copy for each block that becomes free; negative: the program has ended.
    """

    is_awaited: bool
    tokens: float


class DemotingBlocks(EndedTurns):
    """A pin ledger above a lower tier."""

    def __init__(
        self,
        pool: BlockPool,
        group_block_tokens: Sequence[int],
        queue_counts: Callable[[], tuple[int, int]],
        *,
        report_turn: Callable[[TurnEnd], None],
        **kept: Any,
    ) -> None:
        """
        Args:
            report_turn: the tier's, guarded: called where a pin's program has ended.
            kept: as `EndedTurns` has them.
        """
        super().__init__(pool, group_block_tokens, queue_counts, **kept)
        self._report_turn = report_turn
        self._turn_of: dict[int, _PinnedTurn] = {}  # by pin id
        self._num_dropped_copies = 0  # since `take_dropped_copies`

    def bind_pin_to_request(
        self, pin_id: int, request_id: str, program: Program
    ) -> None:
        """The pin holds what this request computed."""
        blocks = len(self._held.get(pin_id, ()))
        self._turn_of[pin_id] = _PinnedTurn(request_id, program, blocks)

    def on_unpinned(
        self, request_id: str, program: Program, blocks: Sequence[KVCacheBlock]
    ) -> None:
        """A turn that may be continued, but that is not worth a pin."""
        self._unref(self._take(request_id))  # an id that is used again
        if not blocks or not self._tier.has_unstored(request_id):
            self._tier.drop(request_id)  # an outage: it would stay queued for ever
        else:
            self.pool.touch(blocks)
            self._ended_refs.update(ids_of(blocks))
            # The request that computed them gives up its references right after this.
            self._keep(request_id, program, list(blocks), users=1)

    def linger_rest(
        self,
        request_id: str,
        program: Program,
        blocks: Sequence[KVCacheBlock],
        pinned_blocks: int,
    ) -> None:
        """A turn's pin has no room for all of its blocks: keep the rest cached.

        The rest costs nothing while no request needs it, and gives way before pins do.

        Args:
            blocks: those that its next turn may find again.
        """
        self._unref(self._take(request_id))  # an id that is used again
        rest = blocks[pinned_blocks:]
        is_demoted = self.is_divisible and self.demotes_parts
        if rest and is_demoted and self._tier.has_unstored(request_id):
            self.pool.touch(rest)
            self._ended_refs.update(ids_of(rest))
            self._keep(request_id, program, list(rest), users=1, first=pinned_blocks)

    def release(
        self, pin_id: int, outcome: PinOutcome, mode: ReleaseMode, needed_blocks: int
    ) -> int:
        turn = self._turn_of.pop(pin_id, None)
        if turn is None:
            return self.unpin(pin_id)
        request_id = turn.request_id
        if (report := pin_end(outcome, request_id)) is not None:
            self._report_turn(report)
        if outcome not in _COMES_BACK:
            return self._drop_turn(request_id) + self.unpin(pin_id)
        if not self._tier.has_unstored(request_id):
            return self.unpin(pin_id)
        self._evicted_at.pop(pin_id, None)
        blocks = self._held.pop(pin_id, [])
        self._ends(blocks)
        blocks += self._lingering.pop_rest(request_id)  # behind the last of them
        if mode is ReleaseMode.KEEP_CACHED:
            return self._keep(request_id, turn.program, blocks)
        return self._give_up(turn, blocks, mode, needed_blocks)

    def unpin(self, pin_id: int) -> int:
        self._turn_of.pop(pin_id, None)
        return super().unpin(pin_id)

    def drop_all(self) -> int:
        self._turn_of.clear()
        return super().drop_all()

    def _give_up(
        self,
        turn: _PinnedTurn,
        blocks: list[KVCacheBlock],
        mode: ReleaseMode,
        needed_blocks: int,
    ) -> int:
        """Of a victim as many blocks as needed are demoted, the rest lingers."""
        cut = self._cut(blocks, needed_blocks)
        tail, head = blocks[cut:], blocks[:cut]
        try:
            if mode is ReleaseMode.FREE_NOW:
                return self._give_now(turn.request_id, tail, cut)
            alone = self._alone(tail)
            self._copy(turn.request_id, tail, cut)
            return alone
        finally:
            if head:
                self._keep(turn.request_id, turn.program, head)

    def _give_now(self, request_id: str, tail: list[KVCacheBlock], cut: int) -> int:
        """Memory is needed now: what is not overwritten in this step is copied."""
        try:
            self._demote(request_id, cut)
        finally:
            freed = self._unref(tail)
        return freed

    def shrink(self, pin_id: int, drop_blocks: int, mode: ReleaseMode) -> Shrunk | None:
        """Drop references from the tail.

        With `COPY_FIRST` just these blocks are copied if the tier can look up a suffix
        without its prefix. If not, the whole turn is copied on its first loss; later
        shrinks then free at once. A loss of less than `UNCOPIED_SHARE` is not copied,
        but recomputed.
        """
        blocks = self._held.get(pin_id, [])
        turn = self._turn_of.get(pin_id)
        keep = len(blocks) - max(0, drop_blocks)
        if turn is None or not self.is_divisible or keep <= 0:
            return super().shrink(pin_id, drop_blocks, mode)
        # What lingers behind a pin is out of reach behind a gap.
        self._unref(self._lingering.pop_rest(turn.request_id))
        finds_suffix = self.demotes_parts
        if (
            mode is not ReleaseMode.COPY_FIRST
            or keep == len(blocks)
            or (keep > turn.blocks * (1 - UNCOPIED_SHARE) and not finds_suffix)
            or not self._tier.has_unstored(turn.request_id)
        ):
            return super().shrink(pin_id, drop_blocks, mode)
        tail = blocks[keep:]
        del blocks[keep:]
        self._ends(tail)
        alone = self._alone(tail)
        self._copy(turn.request_id, tail, keep, alone=finds_suffix)
        return Shrunk(alone, keep, keep * self._group_block_tokens[0])

    def start_copies_ahead(self, tokens_ahead: Callable[[], Sequence[int]]) -> int:
        """Begin to copy as many blocks as running requests are about to need.

        Waiting requests can wait for a copy, which may be needless by then.

        Args:
            tokens_ahead: for each running request, tokens of its prompt to come.

        Returns:
            Blocks that pins may have to give, see `copy_tail_ahead`.
        """
        free = self.pool.get_num_free_blocks()
        if free >= self._room_blocks or not (self._lingering or self.demotes_parts):
            return 0
        # An answer's next token may begin a block, and the one after the copy another.
        wanted = sum(
            sum(tokens // size + 2 for size in self._group_block_tokens)
            for tokens in tokens_ahead()
        )
        lack = min(wanted, self._room_blocks) - free
        if lack <= 0:
            return 0
        self._make_room(lack)
        lack -= self.pool.get_num_free_blocks() - free + self.soon_free()
        return lack if lack > 0 and self.demotes_parts else 0

    def copy_tail_ahead(self, pin_id: int, blocks: int) -> int:
        """A running request may take a pin's last blocks any moment: copy them ahead.

        A block taken before its copy would make all stored blocks behind it
        unreachable. The pin keeps them until then.

        Returns:
            How many of them that request may take.
        """
        held = self._held.get(pin_id, [])
        turn = self._turn_of.get(pin_id)
        if turn is not None:
            self._demote(turn.request_id, max(0, len(held) - max(blocks, LEAST_PIECE)))
        return min(blocks, len(held))

    def _make_room(self, blocks: int) -> int:
        """Begin to copy lingering turns until so many blocks are free soon.

        Returns:
            Blocks that became free at once.
        """
        lack, freed = blocks - self.soon_free(), 0
        for turn in self._cheapest_first(lack):
            if lack <= 0:
                break
            if not self._alone(turn.blocks):
                continue  # others use it all: nothing would become free
            cut = 0 if turn.program.ended else self._cut(turn.blocks, lack)
            # What other ended turns share comes free with the last of them.
            lack -= sum(b.ref_cnt == 1 for b in turn.blocks[cut:])
            if turn.program.ended:
                freed += self._drop_turn(turn.request_id)
            else:
                tail = self._lingering.pop_tail(turn.request_id, cut)
                freed += self._copy(turn.request_id, tail, turn.first + cut)
        return freed

    def _cheapest_first(self, lack: int) -> Iterator[Turn]:
        """Lingering turns, those first of which least has to be copied.

        Some of the oldest are compared: a large pool may hold thousands.
        """
        if lack <= 0:
            return
        turns = self._lingering.in_order()
        if self.demotes_parts:
            compared = self._by_cost(islice(turns, COMPARED), lack)
            yield from (turn for _, turn in compared)
        yield from turns

    def _by_cost(self, turns: Iterable[Turn], lack: int) -> list[tuple[_Cost, Turn]]:
        costs = [(self._cost(turn, lack), turn) for turn in turns]
        # sort() is stable: of turns alike the oldest goes first.
        costs.sort(key=lambda each: each[0])
        return costs

    def _cost(self, turn: Turn, lack: int) -> _Cost:
        """Tokens to copy for each block that becomes free."""
        if turn.program.ended:
            return _Cost(False, -1.0)
        cut = self._cut(turn.blocks, lack)
        size = self._group_block_tokens[0]
        start, end = turn.first + cut, turn.first + len(turn.blocks)
        tokens = self._tier.count_unstored(turn.request_id, start * size, end * size)
        gain = max(1, self._alone(turn.blocks[cut:]))
        return _Cost(turn.program.live_requests > 0, tokens / gain)

    def free_cheapest(self, needed_blocks: int) -> int:
        """Free, without waiting for a copy, blocks whose loss costs nothing more.

        For a running request: lingering blocks that are stored already, that no stored
        suffix depends on, or that are the unpinned rest of a pinned turn (whose pin
        would be the next victim). Their copy is ordered all the same: what is not
        overwritten in this step is copied.

        Returns:
            Blocks that became free.
        """
        freed = 0
        turns = islice(self._lingering.in_order(), COMPARED)
        for cost, turn in self._by_cost(turns, needed_blocks):
            if freed >= needed_blocks:
                break
            if turn.program.ended:
                freed += self._drop_turn(turn.request_id)
                continue
            is_cheap = turn.first or not cost.tokens
            if is_cheap or not self._tier.has_suffix(turn.request_id):
                freed += self._give(turn, needed_blocks - freed)
        return freed

    def _give(self, turn: Turn, lack: int) -> int:
        """The end of a lingering turn, at once."""
        cut = self._cut(turn.blocks, lack)
        if not self._alone(turn.blocks[cut:]):
            return 0  # others use it all: nothing would become free
        tail = self._lingering.pop_tail(turn.request_id, cut)
        return self._give_now(turn.request_id, tail, turn.first + cut)

    def free_expired(self, needed_blocks: int, *, at_once: bool) -> int:
        """Free ended turns' blocks.

        Args:
            at_once: also before their copy, which a waiting request should wait for.

        Returns:
            Blocks that became free.
        """
        freed = self._drop_copies(needed_blocks, overdue=True)
        if not at_once:
            return freed + self._make_room(needed_blocks - freed)
        for turn in self._lingering.in_order():
            if freed >= needed_blocks:
                return freed
            freed += self._give(turn, needed_blocks - freed)
        return freed + self._drop_copies(needed_blocks - freed, overdue=False)

    def _drop_copies(self, needed_blocks: int, *, overdue: bool) -> int:
        freed = 0
        for request_id in self._copies:
            if freed >= needed_blocks:
                break
            if not overdue or self._copies.is_overdue(request_id):
                freed += self._unref(self._copies.pop(request_id))
                self._num_dropped_copies += 1
        return freed

    def take_dropped_copies(self) -> int:
        """Copies given up before they began, since the last call."""
        count, self._num_dropped_copies = self._num_dropped_copies, 0
        return count
