"""Room to grow: new programs start where those under way will still fit as they grow.

Retention keeps what a program has; it cannot keep room for what the program will need.
When more programs are under way than fit once they are large, each one's growth takes
somebody else's pin, and that context is computed again, at the end of its life, when it
costs most. Contexts as they are now say nothing of that: programs start small.
"""

from __future__ import annotations

from dataclasses import dataclass

from ttlcache.admission import AdmissionControl
from ttlcache.estimators import SlidingMean
from ttlcache.events import Admission
from ttlcache.programs import Program
from ttlcache.types import Pressure

#: Ended programs over which the mean is taken, and below which nothing is known.
WINDOW, MIN_ENDED = 1000, 5


@dataclass(slots=True)
class _Share:
    """kv_blocks: the context of its latest turn. growth_blocks: room kept for it."""

    kv_blocks: float
    growth_blocks: float


class RoomToGrow(AdmissionControl):
    """A new program waits until its context and everybody's growth fit.

        needed + growth(needed) + sum of growth(c) over those that hold memory <= free
        growth(c) = share * max(0, mean context of ended programs - c)

    with c the blocks of a context. A share of 1/2 would count a program as the mean of
    its context now and at its end: programs are at different points of their lives, and
    not all are at their largest together. Who holds memory: a program with a turn under
    way, or a pin. One that has started is never held back, nor its sub-agents, and
    before some have ended nobody is. O(1) per event and per question.
    """

    needs_order = True

    def __init__(self, share: float, block_tokens: int) -> None:
        self._share = share
        self._block_tokens = block_tokens
        self._held: dict[Program, _Share] = {}
        self._growth_blocks = 0.0
        self._final_blocks = SlidingMean(WINDOW)

    @property
    def growth_blocks(self) -> float:
        """Room left for those that hold memory."""
        return self._growth_blocks

    def reasons(self, program: Program, kv_blocks: float, now_s: float) -> None:
        self._drop(program)
        growth_blocks = self._growth(kv_blocks)
        self._held[program] = _Share(kv_blocks, growth_blocks)
        self._growth_blocks += growth_blocks

    def acts(self, program: Program, kv_blocks: float, now_s: float) -> None:
        # Its pin, if there is one, was begun before this.
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

    def admit(
        self, program: Program, kv_blocks: float, pressure: Pressure, now_s: float
    ) -> Admission:
        lack = self.lack_blocks(program, kv_blocks, pressure)
        return Admission.ADMIT if lack <= 0.0 else Admission.WAIT

    def lack_blocks(
        self, program: Program, kv_blocks: float, pressure: Pressure
    ) -> float:
        knows = self._final_blocks.count >= MIN_ENDED
        if not knows or not self._held or program in self._held:
            return 0.0
        if _has_started(program):
            return 0.0
        wanted = kv_blocks + self._growth(kv_blocks) + self._growth_blocks
        return wanted - pressure.free_blocks

    def _growth(self, kv_blocks: float) -> float:
        final = self._final_blocks
        if final.count < MIN_ENDED:
            return 0.0
        return self._share * max(0.0, final.value - kv_blocks)

    def _drop(self, program: Program) -> _Share | None:
        share = self._held.pop(program, None)
        if share is not None:
            self._growth_blocks -= share.growth_blocks
        if not self._held:  # rounding must not add up over millions of programs
            self._growth_blocks = 0.0
        return share


def _has_started(program: Program) -> bool:
    parent = program.parent
    return program.turns_finished > 0 or (
        parent is not None and (parent.turns_finished > 0 or parent.in_flight > 0)
    )
