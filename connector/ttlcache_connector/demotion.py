"""Pins that end but whose blocks are still to be copied to the lower tier.

The pin is over for the core; here its references stay until the tier has taken over
(it holds its own while it copies), or until somebody needs the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ttlcache.clock import Clock
from ttlcache.pins import Pin
from ttlcache.types import PinOutcome
from ttlcache_connector.blocks import PinLedger
from ttlcache_connector.tiers import SchedulerTier

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

#: How a pin that ended thus leaves a turn that somebody may still come back to.
_COMES_BACK = frozenset({PinOutcome.EXPIRED, PinOutcome.VICTIM})

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
    ) -> None:
        """
        Args:
            wait_s: how long a waiting request lets an ended pin be copied.
        """
        super().__init__(pool, group_block_tokens, queue_counts)
        self._tier = tier
        self._clock = clock
        self._wait_s = wait_s
        self._turn_of: dict[int, str] = {}
        self._ending: tuple[Pin, PinOutcome] | None = None
        self.on_turn_end: OnTurnEnd = lambda pin, outcome, request_id: None
        #: request id -> (blocks, when a waiting request may take them)
        self._demoting: dict[str, tuple[list[KVCacheBlock], float]] = {}
        tier.on_settled = self.settled

    @property
    def demoting_blocks(self) -> int:
        return sum(len(blocks) for blocks, _ in self._demoting.values())

    def is_turn_of(self, pin_id: int, request_id: str) -> None:
        """The pin holds what this request computed."""
        self._turn_of[pin_id] = request_id

    def pin_ends(self, pin: Pin, outcome: PinOutcome) -> None:
        """`release` of this pin follows; this is why."""
        self._ending = (pin, outcome)

    def unpinned(self, request_id: str, blocks: Sequence[KVCacheBlock]) -> None:
        """A turn that somebody may come back to, but that is not worth a pin."""
        if blocks and self._tier.demote(request_id):
            self.pool.touch(blocks)
            for block in blocks:
                self._refs[block.block_id] += 1
            self._keep(request_id, list(blocks))

    def release(self, pin_id: int) -> int:
        request_id = self._turn_of.pop(pin_id, None)
        ending, self._ending = self._ending, None
        if request_id is not None and ending is not None:
            self.on_turn_end(*ending, request_id)
        if request_id is None or ending is None or ending[0].pin_id != pin_id:
            return super().release(pin_id)
        if ending[1] not in _COMES_BACK:
            self._tier.forget(request_id)
            return super().release(pin_id)
        if self._tier.demote(request_id) and ending[1] is PinOutcome.EXPIRED:
            self._keep(request_id, self._held.pop(pin_id, []))
            return 0
        # Memory is needed now: the tier copies what nobody overwrites in this step.
        return super().release(pin_id)

    def settled(self, request_id: str) -> None:
        """The tier holds the blocks itself now, or does not want them any more."""
        blocks, _ = self._demoting.pop(request_id, ([], 0.0))
        self._drop(blocks)

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
        """Give ended pins' memory up before its copy, oldest first.

        Args:
            at_once: also of those that a waiting request should wait for.

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
                freed += self._drop(blocks)
                self._tier.on_demotion("dropped")
        return freed

    def release_demoting(self) -> None:
        """Reset, shutdown: nothing is kept for a copy."""
        for request_id in list(self._demoting):
            self._tier.forget(request_id)
            self.settled(request_id)

    def references(self) -> dict[int, int]:
        counts = super().references()
        for block_id, count in self._tier.references().items():
            counts[block_id] = counts.get(block_id, 0) + count
        return counts

    def _keep(self, request_id: str, blocks: list[KVCacheBlock]) -> None:
        self.settled(request_id)  # an id that is used again
        self._demoting[request_id] = (blocks, self._clock.now_s() + self._wait_s)
