"""Pins that end but whose blocks are still to be copied to the lower tier.

The pin is over for the core; here its references stay until the tier has taken over
(it holds its own while it copies), or until somebody needs the memory. With `linger`
the copy begins only when room gets short: see `lingering`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ttlcache.clock import Clock
from ttlcache.events import Shrunk
from ttlcache.pins import Pin
from ttlcache.programs import Program
from ttlcache.types import PinOutcome, Pressure
from ttlcache_connector.blocks import PinLedger, ids_of
from ttlcache_connector.lingering import Lingering, Turn
from ttlcache_connector.tiers import SchedulerTier

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

#: How a pin that ended thus leaves a turn that somebody may still come back to.
_COMES_BACK = frozenset({PinOutcome.EXPIRED, PinOutcome.VICTIM})

#: A pin that gave up no more of its turn is not copied for that where the tier finds
#: nothing without all that stands before it: five bytes would move for each one saved.
UNCOPIED_SHARE = 0.2

#: Blocks of a pin that are copied ahead at a time: to copy costs a message to the tier,
#: however little it is.
LEAST_PIECE = 8

#: Told how the pin of this request's turn ended.
OnTurnEnd = Callable[[Pin, PinOutcome, str], None]


class DemotingLedger(PinLedger):
    """A pin ledger above a lower tier."""

    def __init__(
        self,
        pool: BlockPool,
        group_block_tokens: Sequence[int],
        queue_counts: Callable[[], tuple[int, int]],
        *,
        tier: SchedulerTier,
        clock: Clock,
        wait_s: float,
        room_blocks: int = 0,
    ) -> None:
        """
        Args:
            wait_s: how long a waiting request lets an ended pin be copied.
            room_blocks: how many blocks to keep free, or about to be, by copying
                turns that linger; 0: nothing lingers, copies begin at once.
        """
        super().__init__(pool, group_block_tokens, queue_counts)
        self._tier = tier
        self._clock = clock
        self._wait_s = wait_s
        self._room_blocks = room_blocks
        self._lingering = Lingering()
        self._copies_first = False
        self._lack = 0.0  # blocks that the copies begun inside are to give
        #: pin id -> (request id, blocks that it pinned)
        self._turn_of: dict[int, tuple[str, int]] = {}
        self._ending: tuple[Pin, PinOutcome] | None = None
        self.on_turn_end: OnTurnEnd = lambda pin, outcome, request_id: None
        #: request id -> (blocks, when a waiting request may take them)
        self._demoting: dict[str, tuple[list[KVCacheBlock], float]] = {}
        tier.on_settled = self.settled

    @property
    def demoting_blocks(self) -> int:
        return sum(len(blocks) for blocks, _ in self._demoting.values())

    @property
    def lingering_blocks(self) -> int:
        return self._lingering.blocks

    @property
    def _goes_in_parts(self) -> bool:
        """Whether a turn may be below in part and here in part.

        Not where nothing lingers: others who read the tier have no use for a tail.
        """
        return bool(self._room_blocks) and self._tier.takes_tails

    def is_turn_of(self, pin_id: int, request_id: str) -> None:
        """The pin holds what this request computed."""
        self._turn_of[pin_id] = (request_id, len(self._held.get(pin_id, ())))

    def pin_ends(self, pin: Pin, outcome: PinOutcome) -> None:
        """`release` of this pin follows; this is why."""
        self._ending = (pin, outcome)

    def unpinned(
        self, request_id: str, program: Program, blocks: Sequence[KVCacheBlock]
    ) -> None:
        """A turn that somebody may come back to, but that is not worth a pin."""
        self._let_go(self._take(request_id))  # an id that is used again
        if not blocks or not self._tier.owes(request_id):
            self._tier.forget(request_id)  # an outage: nobody would ever ask again
        else:
            self.pool.touch(blocks)
            self._ended_refs.update(ids_of(blocks))
            # The request that computed them lets go of them right after this.
            self._keep(request_id, program, list(blocks), users=1)

    def has_rest(
        self,
        request_id: str,
        program: Program,
        blocks: Sequence[KVCacheBlock],
        pinned_blocks: int,
    ) -> None:
        """A turn's pin has no room for all of its blocks.

        The others cost nothing while nobody needs them, and give way before pins do.

        Args:
            blocks: those that its next turn may find again.
        """
        self._let_go(self._take(request_id))  # an id that is used again
        rest = blocks[pinned_blocks:]
        goes_down = self.is_divisible and self._goes_in_parts
        if rest and goes_down and self._tier.owes(request_id):
            self.pool.touch(rest)
            self._ended_refs.update(ids_of(rest))
            self._keep(request_id, program, list(rest), users=1, first=pinned_blocks)

    def release(self, pin_id: int) -> int:
        request_id, _ = self._turn_of.pop(pin_id, (None, 0))
        ending, self._ending = self._ending, None
        if request_id is not None and ending is not None:
            self.on_turn_end(*ending, request_id)
        if request_id is None or ending is None or ending[0].pin_id != pin_id:
            return super().release(pin_id)
        pin, outcome = ending
        if outcome not in _COMES_BACK:
            return self._forget(request_id) + super().release(pin_id)
        goes_down = outcome is PinOutcome.EXPIRED or self._copies_first
        if not goes_down or not self._tier.owes(request_id):
            # Memory is needed now: what nobody overwrites in this step is copied.
            self._tier.demote(request_id)
            return super().release(pin_id)
        blocks = self._held.pop(pin_id, [])
        self._ends(blocks)
        blocks += self._lingering.pop_rest(request_id)
        if outcome is PinOutcome.EXPIRED:
            return self._keep(request_id, pin.program, blocks)
        return self._give_up(request_id, pin.program, blocks)

    def _give_up(
        self, request_id: str, program: Program, blocks: list[KVCacheBlock]
    ) -> int:
        """What is needed of a victim goes down, the rest lingers."""
        cut = self._cut(blocks, self._lack)
        tail, head = blocks[cut:], blocks[:cut]
        alone = self._alone(tail)
        self._lack -= alone
        try:
            self._copy(request_id, tail, cut)
        finally:
            if head:
                self._keep(request_id, program, head)
        return alone

    def shrink(self, pin_id: int, drop_blocks: int) -> Shrunk:
        blocks = self._held.get(pin_id, [])
        request_id, whole = self._turn_of.get(pin_id, (None, 0))
        keep = len(blocks) - max(0, drop_blocks)
        alone_below = self._goes_in_parts
        if (
            not self._copies_first
            or not self.is_divisible
            or not 0 < keep < len(blocks)
            or (keep > whole * (1 - UNCOPIED_SHARE) and not alone_below)
            or request_id is None
            or not self._tier.owes(request_id)
        ):
            return super().shrink(pin_id, drop_blocks)
        first = keep if alone_below else 0
        tail = blocks[keep:]
        del blocks[keep:]
        self._ends(tail)
        alone = self._alone(tail)
        self._lack -= alone
        self._copy(request_id, tail, first)
        return Shrunk(alone, keep, keep * self._group_block_tokens[0])

    @contextmanager
    def copying_first(self, blocks: float = math.inf) -> Iterator[None]:
        """Inside, victims are copied, and count as free although they are only soon.

        Where tails are found alone, no more goes down than is needed, and what else a
        victim has lingers. Elsewhere a turn goes down as a whole: what its pin gives up
        later is free at once, and a short tail alone is lost: it is prefilled again
        with the next turn's prompt.

        Args:
            blocks: how many are needed.
        """
        self._copies_first, self._lack = True, blocks
        try:
            yield
        finally:
            self._copies_first = False

    def settled(self, request_id: str) -> int:
        """The tier holds what was to be copied, or does not want it any more."""
        if not self._tier.owes(request_id):
            return self._forget(request_id)
        blocks, _ = self._demoting.pop(request_id, ([], 0.0))
        return self._let_go(blocks)

    def _forget(self, request_id: str) -> int:
        """Nobody comes back to the turn; returns blocks that became free."""
        self._tier.forget(request_id)
        return self._let_go(self._take(request_id))

    def _take(self, request_id: str) -> list[KVCacheBlock]:
        """What is held of an ended turn leaves the tables."""
        blocks, _ = self._demoting.pop(request_id, ([], 0.0))
        return blocks + self._lingering.pop(request_id)

    def followed(self, program: Program) -> None:
        """A turn of the program got its memory: what it found need not go down.

        It offers the same to the tier when it ends, with its own.
        """
        for turn in self._lingering.of(program):
            # Another branch of the program may have found no more than its beginning.
            copied, _ = self._demoting.get(turn.request_id, (turn.blocks, 0.0))
            tail = copied[-1]
            if tail.ref_cnt > self._ended_refs[tail.block_id]:
                self._forget(turn.request_id)

    def keep_room(self, tokens_ahead: Callable[[], Sequence[int]]) -> int:
        """Begin to copy as much as running requests are about to need.

        Those that wait can wait for a copy, which may be needless by then.

        Args:
            tokens_ahead: for each running request, tokens of its prompt to come.

        Returns:
            Blocks that pins may have to give, see `copy_end`.
        """
        free = self.pool.get_num_free_blocks()
        if free >= self._room_blocks or not (self._lingering or self._goes_in_parts):
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
        return lack if lack > 0 and self._goes_in_parts else 0

    def copy_end(self, pin_id: int, blocks: int) -> int:
        """A running request may take a pin's last blocks any moment: copy them ahead.

        One that is taken before its copy would put all that is below behind it out of
        reach. The pin keeps them until then.

        Returns:
            How many of them that request may take.
        """
        held = self._held.get(pin_id, [])
        request_id, _ = self._turn_of.get(pin_id, (None, 0))
        if request_id is not None:
            self._demote(request_id, max(0, len(held) - max(blocks, LEAST_PIECE)))
        return min(blocks, len(held))

    def _make_room(self, blocks: int) -> int:
        """Begin to copy lingering turns until so many blocks are free soon.

        Returns:
            Blocks that became free at once.
        """
        lack, freed = blocks - self.soon_free(), 0
        for turn in self._lingering.in_order():
            if lack <= 0:
                break
            if not self._alone(turn.blocks):
                continue  # others use it all: nothing would become free
            cut = 0 if turn.program.ended else self._cut(turn.blocks, lack)
            # What other ended turns share comes free with the last of them.
            lack -= sum(b.ref_cnt == 1 for b in turn.blocks[cut:])
            if turn.program.ended:
                freed += self._forget(turn.request_id)
            else:
                tail = self._lingering.pop_tail(turn.request_id, cut)
                freed += self._copy(turn.request_id, tail, turn.first + cut)
        return freed

    def _cut(self, blocks: Sequence[KVCacheBlock], lack: float) -> int:
        """From which of these on they go down, where `lack` of them are needed."""
        if not self._goes_in_parts:
            return 0
        for cut in range(len(blocks) - 1, 0, -1):
            lack -= blocks[cut].ref_cnt == self._ended_refs[blocks[cut].block_id]
            if lack <= 0:
                return cut
        return 0

    def soon_free(self) -> int:
        """Blocks that a waiting request should wait for."""
        now_s = self._clock.now_s()
        waiting = sum(len(b) for b, due_s in self._demoting.values() if due_s > now_s)
        table = self.pool.blocks
        copied = sum(
            table[block_id].ref_cnt == count
            for block_id, count in self._tier.references().items()
        )
        return waiting + copied

    def relieve(self, needed_blocks: int, *, at_once: bool) -> int:
        """Give ended turns' memory up.

        Args:
            at_once: also before its copy, which a waiting request should wait for.

        Returns:
            Blocks that became free.
        """
        now_s = self._clock.now_s()
        freed = 0
        for request_id, (_, due_s) in list(self._demoting.items()):
            if freed >= needed_blocks:
                break
            if at_once or due_s <= now_s:
                blocks, _ = self._demoting.pop(request_id)
                freed += self._let_go(blocks)
                self._tier.on_demotion("dropped")
        if not at_once:
            return freed + self._make_room(needed_blocks - freed)
        for turn in self._lingering.in_order():
            if freed >= needed_blocks:
                break
            # As with victims: what nobody overwrites in this step is copied.
            cut = self._cut(turn.blocks, needed_blocks - freed)
            self._demote(turn.request_id, turn.first + cut)
            freed += self._let_go(self._lingering.pop_tail(turn.request_id, cut))
        return freed

    def drop_all(self) -> int:
        before = self.pool.get_num_free_blocks()
        super().drop_all()
        # Memory first: what failed may be the tier.
        ended = [*self._demoting, *(turn.request_id for turn in self._lingering)]
        for request_id in ended:
            self._let_go(self._take(request_id))
        for request_id in ended:
            self._tier.forget(request_id)
        return int(self.pool.get_num_free_blocks() - before)

    def release_demoting(self) -> None:
        """Reset, shutdown: nothing is kept for a copy."""
        for request_id in [*self._demoting, *(t.request_id for t in self._lingering)]:
            self._forget(request_id)

    def references(self) -> dict[int, int]:
        counts = Counter(super().references())
        # From the tables, so that the invariant checker sees what they have lost.
        for blocks, _ in self._demoting.values():
            counts.update(ids_of(blocks))
        for turn in self._lingering:
            counts.update(ids_of(turn.blocks))
        counts.update(self._tier.references())
        return dict(counts)

    def pressure(self) -> Pressure:
        pressure = super().pressure()
        free = pressure.free_blocks + self._lingering.free_blocks
        most = pressure.pool_blocks - pressure.pinned_blocks
        return pressure._replace(free_blocks=min(free, most))

    def _keep(
        self,
        request_id: str,
        program: Program,
        blocks: list[KVCacheBlock],
        users: int = 0,
        first: int = 0,
    ) -> int:
        """Ended, referenced, to be copied; returns blocks that became free.

        users: requests that still reference them, and are about to let go.
        first: the turn's blocks before these, which its pin holds.
        """
        self._let_go(self._lingering.pop(request_id))  # an id that is used again
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
        """How many of these nobody references but ended turns."""
        refs = self._ended_refs
        return sum(b.ref_cnt == refs[b.block_id] for b in blocks)

    def _copy(self, request_id: str, blocks: list[KVCacheBlock], first: int = 0) -> int:
        """Begin the copy, keep the blocks for it; returns those that became free.

        first: what stands before the turn's block of this number is not copied.
        """
        try:
            begin = self._demote(request_id, first)
        except Exception:
            self._let_go(blocks)
            raise
        if begin is None:
            return self._let_go(blocks)
        # What is below already waits for nothing.
        known = max(0, begin - first)
        freed, blocks = self._let_go(blocks[:known]), blocks[known:]
        due_s = self._clock.now_s() + self._wait_s
        later, earliest_s = self._demoting.get(request_id, ([], due_s))
        self._demoting[request_id] = (blocks + later, min(due_s, earliest_s))
        return freed

    def _let_go(self, blocks: list[KVCacheBlock]) -> int:
        return self._drop(blocks, self._ended_refs)

    def _demote(self, request_id: str, first: int) -> int | None:
        """From which block on it is copied; None: not at all."""
        size = self._group_block_tokens[0]
        begin = self._tier.demote(request_id, first * size)
        return None if begin is None else begin // size
