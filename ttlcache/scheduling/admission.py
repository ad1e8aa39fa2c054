"""Admission control: which programs may start while others are under way.

Retention alone cannot help when more programs are under way than fit once they are
large: the growth of each evicts the pin of another, and that context is computed again
at the end of its program's life, when it costs most (thrashing). The contexts as they
are now do not show it: programs start small.

Two units of memory, which differ with several KV cache groups: context blocks (tokens
over the tokens of a prefix-cache hash) and pool blocks (what the engine allocates).
"""

from __future__ import annotations

from dataclasses import dataclass

from ttlcache.config import TTLCacheConfig, admission_in_force
from ttlcache.estimators.sliding_mean import SlidingMean
from ttlcache.programs.model import Program
from ttlcache.types import Pressure

#: Ended programs over which the mean is taken, and below which nothing is known.
WINDOW, MIN_ENDED = 1000, 5
#: Of the growth that programs under way still expect, the part that is reserved: chosen
#: on odd lines of the traces (docs/research/policy-log.md).
GROWTH_SHARE = 0.4
#: Of the pool, the part reserved for growth at most: where short and long programs come
#: together the mean is far from either, and half of the memory serves any request.
MAX_POOL_SHARE = 0.5


class AdmissionControl:
    """Sees what programs do, and says what a new one still lacks to start.

    This one counts nothing: a request that fits may start.
    """

    @property
    def reserved_pool_blocks(self) -> float:
        """Blocks that programs under way are expected to need still."""
        return 0.0

    def on_context(self, program: Program, context_blocks: float) -> None:
        """A turn of `program` got its memory, or finished: its context is so large."""

    def on_program_start(self, cached_context_blocks: float) -> None:
        """A new program got its memory: so much of its prompt was in there."""

    def on_no_pin(self, program: Program) -> None:
        """No pin for its context: its turn got none, or lost it, or was aborted."""

    def on_program_end(self, program: Program) -> None:
        """It ended, or was forgotten."""

    def on_pool_blocks(self, context_blocks: float, pool_blocks: float) -> None:
        """A context has so many blocks of the pool, with those that others share."""

    def is_newcomer(self, program: Program) -> bool:
        """Whether it has not started, nor what it is a sub-agent of."""
        own = (program, program.parent) if program.parent else (program,)
        return not any(each.has_started for each in own)

    def missing_blocks(
        self,
        program: Program,
        needed_pool_blocks: float,
        context_blocks: float,
        pressure: Pressure,
    ) -> float:
        """Free pool blocks that a request of `program` lacks; 0 or less: it may start.

        Args:
            needed_pool_blocks: beside those that it found cached.
            context_blocks: of its whole prompt.
        """
        return 0.0


@dataclass(slots=True)
class _Share:
    """The context of a program's latest turn, and the growth reserved for it."""

    context_blocks: float
    growth_context_blocks: float


class GrowthReserve(AdmissionControl):
    """A new program waits until its own context and the growth of all fit, nothing
    runs, no turn has started for as long as one takes
    (`MemoryArbiter.admits_all_from_s`), or it has waited for `max_queue_wait_s` (the
    engine adapter's part):

        needed + min(growth(c of the new one) + sum of growth(c) over those that hold
        memory, half of the pool) <= free
        growth(c) = share * (1 - s) * max(0, F - c)

    with c the blocks of a context, F the mean of ended programs' last ones, and s the
    part of F that new programs find cached in the mean: a shared head is not computed
    again when a pin falls. Not all are at their largest together, hence the share. One
    holds memory while a turn is under way or pinned; its growth is that of its latest
    event. Started ones and their sub-agents never wait, nor any before some have ended.
    """

    def __init__(self, share: float, block_tokens: int) -> None:
        """
        Args:
            share: of the expected growth, the part that is reserved.
            block_tokens: tokens of a block of a context.
        """
        self._share = share
        self._block_tokens = block_tokens
        self._shares: dict[Program, _Share] = {}
        self._growth_context_blocks = 0.0  # the sum over them
        self._final_context_blocks = SlidingMean(WINDOW)
        self._cached_context_blocks = SlidingMean(WINDOW)  # at programs' starts
        # Sums over turns' contexts; older ones fade.
        self._turn_context_blocks = self._turn_pool_blocks = 0.0

    @property
    def reserved_pool_blocks(self) -> float:
        return self._growth_context_blocks * self._pool_blocks_per_context_block

    def on_context(self, program: Program, context_blocks: float) -> None:
        self._drop(program)
        if program.ended:  # what its requests still do says nothing of others
            return
        growth = self._expected_growth_context_blocks(context_blocks)
        self._shares[program] = _Share(context_blocks, growth)
        self._growth_context_blocks += growth

    def on_program_start(self, cached_context_blocks: float) -> None:
        self._cached_context_blocks.observe(cached_context_blocks)

    def on_no_pin(self, program: Program) -> None:
        pinned = any(turn.pin_id is not None for turn in program.awaited_turns)
        if not program.live_requests and not pinned:
            self._drop(program)

    def on_program_end(self, program: Program) -> None:
        share = self._drop(program)
        if share is not None:
            self._final_context_blocks.observe(share.context_blocks)
        elif program.awaited_turns:
            tokens = max(turn.context_tokens for turn in program.awaited_turns)
            self._final_context_blocks.observe(tokens / self._block_tokens)

    def on_pool_blocks(self, context_blocks: float, pool_blocks: float) -> None:
        keep = 1.0 - 1.0 / WINDOW
        self._turn_context_blocks = keep * self._turn_context_blocks + context_blocks
        self._turn_pool_blocks = keep * self._turn_pool_blocks + pool_blocks

    def missing_blocks(
        self,
        program: Program,
        needed_pool_blocks: float,
        context_blocks: float,
        pressure: Pressure,
    ) -> float:
        nothing_known = self._final_context_blocks.count < MIN_ENDED
        if not self._shares or nothing_known or not self.is_newcomer(program):
            return 0.0
        growth = self._expected_growth_context_blocks(context_blocks)
        growth += self._growth_context_blocks
        reserved = growth * self._pool_blocks_per_context_block
        reserved = min(reserved, MAX_POOL_SHARE * pressure.pool_blocks)
        return needed_pool_blocks + reserved - pressure.free_blocks

    def is_newcomer(self, program: Program) -> bool:
        if self._has_started(program):
            return False
        return program.parent is None or not self._has_started(program.parent)

    def _has_started(self, program: Program) -> bool:
        return program.turns_finished > 0 or program in self._shares

    @property
    def _pool_blocks_per_context_block(self) -> float:
        """One, but for several KV cache groups: those have more, or larger, blocks."""
        if not self._turn_context_blocks:
            return 1.0
        return self._turn_pool_blocks / self._turn_context_blocks

    def _expected_growth_context_blocks(self, context_blocks: float) -> float:
        final = self._final_context_blocks
        if final.count < MIN_ENDED or final.value <= context_blocks:
            return 0.0
        found = min(1.0, self._cached_context_blocks.value / final.value)
        return self._share * (1.0 - found) * (final.value - context_blocks)

    def _drop(self, program: Program) -> _Share | None:
        share = self._shares.pop(program, None)
        if share is not None:
            self._growth_context_blocks -= share.growth_context_blocks
        if not self._shares:  # rounding must not add up over millions of programs
            self._growth_context_blocks = 0.0
        return share


def create(config: TTLCacheConfig, block_tokens: int) -> AdmissionControl:
    """The admission control of a configuration."""
    if admission_in_force(config) == "room-to-grow":
        return GrowthReserve(GROWTH_SHARE, block_tokens)
    return AdmissionControl()
