"""Which programs may start: admission control on program memory.

Retention alone cannot help when the contexts of all programs under way do not fit:
each return evicts somebody else. Then it pays to let fewer programs run at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from ttlcache.programs.model import Program
from ttlcache.types import Admission, Pressure


class AdmissionControl(ABC):
    """Told what programs do; asked whether a new one may start.

    needs_order: asked only where the queue stands in an order by program.
    """

    needs_order: ClassVar[bool] = False

    @property
    def growth_blocks(self) -> float:
        """Free blocks that new programs leave to those under way."""
        return 0.0

    @abstractmethod
    def reasons(self, program: Program, kv_blocks: float, now_s: float) -> None:
        """A turn of `program` is under way with a context of `kv_blocks`."""

    @abstractmethod
    def acts(self, program: Program, kv_blocks: float, now_s: float) -> None:
        """Its last turn finished: a tool runs."""

    def lets_go(self, program: Program) -> None:  # noqa: B027 - most need not know
        """No pin holds its context: its turn got none, or lost it, or was aborted."""

    def weighs(self, kv_blocks: float, footprint_blocks: float) -> None:  # noqa: B027
        """A context of `kv_blocks` took so many blocks of the pool."""

    @abstractmethod
    def leaves(self, program: Program, now_s: float) -> None:
        """It ended, or was forgotten."""

    @abstractmethod
    def admit(
        self,
        program: Program,
        kv_blocks: float,
        pressure: Pressure,
        now_s: float,
        *,
        context_blocks: float,
    ) -> Admission:
        """Whether a request of `program` needing `kv_blocks` may take memory.

        Args:
            kv_blocks: of the pool, beside what it found cached.
            context_blocks: of its whole prompt.
        """

    def lack_blocks(
        self,
        program: Program,
        kv_blocks: float,
        context_blocks: float,
        pressure: Pressure,
    ) -> float:
        """How many more free blocks would let it in; 0: that is not what it lacks."""
        return 0.0


class AdmitAll(AdmissionControl):
    """No control: what fits, runs."""

    def reasons(self, program: Program, kv_blocks: float, now_s: float) -> None:
        """Not counted."""

    def acts(self, program: Program, kv_blocks: float, now_s: float) -> None:
        """Not counted."""

    def leaves(self, program: Program, now_s: float) -> None:
        """Not counted."""

    def admit(
        self,
        program: Program,
        kv_blocks: float,
        pressure: Pressure,
        now_s: float,
        *,
        context_blocks: float,
    ) -> Admission:
        return Admission.ADMIT


@dataclass(slots=True)
class _Share:
    kv_blocks: float
    acting_since_s: float | None  # None while reasoning


class WorkingSet(AdmissionControl):
    """New programs wait while those under way fill the pool.

    After ThunderAgent (arXiv 2602.13692, §4; MORI keeps the same sum per tier):

        load = sum over reasoning of c + sum over acting of c * 2^(-t / half_life)

    with c the blocks of a program's context and t the time its tool has run. A
    program that has started is never held back here, nor is its sub-agent, so every
    program under way can finish; new ones wait until their own need fits beside the
    load. The wait is bounded: programs under way lose their place in the queue after a
    quantum, `max_queue_wait_s` overrules admission, and so does an engine with
    nothing to run.

    The decayed sum is kept incrementally: O(1) per event and per question.
    """

    def __init__(self, half_life_s: float) -> None:
        self._half_life_s = half_life_s
        self._shares: dict[Program, _Share] = {}
        self._reasoning_blocks = 0.0
        self._acting_blocks = 0.0  # decayed to `_as_of_s`
        self._as_of_s = 0.0

    def load_blocks(self, now_s: float) -> float:
        """The projected KV of the programs under way, in blocks."""
        self._decay(now_s)
        return self._reasoning_blocks + self._acting_blocks

    def reasons(self, program: Program, kv_blocks: float, now_s: float) -> None:
        self.leaves(program, now_s)
        self._shares[program] = _Share(kv_blocks, None)
        self._reasoning_blocks += kv_blocks

    def acts(self, program: Program, kv_blocks: float, now_s: float) -> None:
        self.leaves(program, now_s)
        # Not `now_s`: on a clock that went back the sum is of a later time.
        self._shares[program] = _Share(kv_blocks, self._as_of_s)
        self._acting_blocks += kv_blocks

    def leaves(self, program: Program, now_s: float) -> None:
        self._decay(now_s)
        share = self._shares.pop(program, None)
        if share is None:
            return
        if share.acting_since_s is None:
            self._reasoning_blocks -= share.kv_blocks
        else:
            waited_s = max(0.0, self._as_of_s - share.acting_since_s)
            self._acting_blocks -= share.kv_blocks * self._discount(waited_s)
        if not self._shares:  # rounding must not add up over millions of programs
            self._reasoning_blocks = self._acting_blocks = 0.0

    def admit(
        self,
        program: Program,
        kv_blocks: float,
        pressure: Pressure,
        now_s: float,
        *,
        context_blocks: float,
    ) -> Admission:
        if program in self._shares or program.parent in self._shares:
            return Admission.ADMIT
        fits = self.load_blocks(now_s) + kv_blocks <= pressure.pool_blocks
        return Admission.ADMIT if fits else Admission.WAIT

    def _decay(self, now_s: float) -> None:
        if now_s > self._as_of_s:
            self._acting_blocks *= self._discount(now_s - self._as_of_s)
            self._as_of_s = now_s

    def _discount(self, seconds: float) -> float:
        return float(2.0 ** (-seconds / self._half_life_s))
