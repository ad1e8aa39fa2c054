"""Room to grow: new programs start where those under way will still fit as they grow.

Retention keeps what a program has; it cannot keep room for what the program will need.
When more programs are under way than fit once they are large, each one's growth takes
somebody else's pin, and that context is computed again, at the end of its life, when it
costs most. Contexts as they are now say nothing of that: programs start small.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ttlcache.estimators.survival import SlidingMean
from ttlcache.programs.model import Program
from ttlcache.scheduling.admission import AdmissionControl
from ttlcache.types import Admission, Pressure

#: Ended programs over which the mean is taken, and below which nothing is known.
WINDOW, MIN_ENDED = 1000, 5
#: Of the pool, what is left free for growth at most: where short and long programs come
#: together the mean is far from either, and half of the memory serves whoever comes.
MOST_OF_POOL = 0.5


@dataclass(slots=True)
class _Share:
    """kv_blocks: the context of its latest turn. growth_blocks: room left for it."""

    kv_blocks: float
    growth_blocks: float


class RoomToGrow(AdmissionControl):
    """A new program waits until its context and everybody's growth fit.

        needed + min(growth(c of the newcomer) + sum of growth(c) over those that hold
        memory, half of the pool) <= free
        growth(c) = share * computed * max(0, mean context of ended programs - c)

    with c the blocks of a context. A share of 1/2 would count a program as the mean of
    its context now and at its end: programs are at different points of their lives, and
    not all are at their largest together. computed: of the seconds that a lost context
    costs, those of prefill (`Tables.computed_share`): 1 without a lower tier, 0 above
    one that keeps what it is given. Who holds memory: a program with a turn under way,
    or a pin; its growth is the one expected at its latest event. A program that has
    started is never held back, nor its sub-agents; nobody is before some have ended.
    O(1) per event and per question.
    """

    needs_order = True

    def __init__(
        self,
        share: float,
        block_tokens: int,
        computed_share: Callable[[], float] = lambda: 1.0,
    ) -> None:
        """
        Args:
            share: of the expected growth, the part for which room is left.
            block_tokens: tokens of a block of a context.
            computed_share: what part of a lost context's cost is prefill, 0 to 1.
        """
        self._computed_share = computed_share
        self._share = share
        self._block_tokens = block_tokens
        self._held: dict[Program, _Share] = {}
        self._growth_sum = 0.0
        self._final_blocks = SlidingMean(WINDOW)
        self._turn_blocks = SlidingMean(WINDOW)
        self._footprint_blocks = SlidingMean(WINDOW)

    @property
    def growth_blocks(self) -> float:
        """Room left for those that hold memory, in blocks of the pool."""
        return self._growth_sum * self._computed_share() * self._width

    def reasons(self, program: Program, kv_blocks: float, now_s: float) -> None:
        self._drop(program)
        if program.ended:  # what its requests still do says nothing of others
            return
        growth_blocks = self._growth(kv_blocks)
        self._held[program] = _Share(kv_blocks, growth_blocks)
        self._growth_sum += growth_blocks

    def acts(self, program: Program, kv_blocks: float, now_s: float) -> None:
        # Held until `lets_go` says that no pin holds it.
        self.reasons(program, kv_blocks, now_s)

    def lets_go(self, program: Program) -> None:
        pinned = any(turn.pin_id is not None for turn in program.open_turns)
        if not program.in_flight and not pinned:
            self._drop(program)

    def leaves(self, program: Program, now_s: float) -> None:
        share = self._drop(program)
        if share is not None:
            self._final_blocks.observe(share.kv_blocks)
        elif program.open_turns:
            tokens = max(turn.context_tokens for turn in program.open_turns)
            self._final_blocks.observe(tokens / self._block_tokens)

    def weighs(self, kv_blocks: float, footprint_blocks: float) -> None:
        if kv_blocks > 0.0 and footprint_blocks > 0.0:
            self._turn_blocks.observe(kv_blocks)
            self._footprint_blocks.observe(footprint_blocks)

    def admit(
        self,
        program: Program,
        kv_blocks: float,
        pressure: Pressure,
        now_s: float,
        *,
        context_blocks: float,
    ) -> Admission:
        lack = self.lack_blocks(program, kv_blocks, context_blocks, pressure)
        return Admission.ADMIT if lack <= 0.0 else Admission.WAIT

    def lack_blocks(
        self,
        program: Program,
        kv_blocks: float,
        context_blocks: float,
        pressure: Pressure,
    ) -> float:
        if not self._holds_back(program):
            return 0.0
        growth_blocks = self._growth(context_blocks) + self._growth_sum
        growth_blocks *= self._computed_share() * self._width
        most_blocks = MOST_OF_POOL * pressure.pool_blocks
        return kv_blocks + min(growth_blocks, most_blocks) - pressure.free_blocks

    def _holds_back(self, program: Program) -> bool:
        """Whether anybody's growth may keep a request of `program` out."""
        if not self._held or self._final_blocks.count < MIN_ENDED:
            return False
        if self._has_started(program):
            return False
        return program.parent is None or not self._has_started(program.parent)

    def _has_started(self, program: Program) -> bool:
        return program.turns_finished > 0 or program in self._held

    @property
    def _width(self) -> float:
        """Blocks of the pool that a block of a context takes.

        More than one with several KV cache groups. Less is what programs share, and
        growth is not shared.
        """
        if not self._turn_blocks.count:
            return 1.0
        return max(1.0, self._footprint_blocks.value / self._turn_blocks.value)

    def _growth(self, kv_blocks: float) -> float:
        final = self._final_blocks
        if final.count < MIN_ENDED:
            return 0.0
        return self._share * max(0.0, final.value - kv_blocks)

    def _drop(self, program: Program) -> _Share | None:
        share = self._held.pop(program, None)
        if share is not None:
            self._growth_sum -= share.growth_blocks
        if not self._held:  # rounding must not add up over millions of programs
            self._growth_sum = 0.0
        return share
