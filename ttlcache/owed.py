"""Room that is owed: what programs lost to memory pressure and have not got back.

A pin gives way for somebody who stands before its program, or for a running request.
What it frees beyond their need would let in programs that stand after its own; those
grow, and when the loser's next turn comes it has to push them out again, contexts and
all. So a waiting request leaves room for what programs before it have lost, as their
pins would have made it.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from sortedcontainers import SortedDict

from ttlcache.ordering import Rank
from ttlcache.pins import Pin
from ttlcache.programs import Program

#: Where a debtor stands, and a number: no two debts compare equal.
_Place = tuple[Rank, int]


#: Debts before the first search for lapsed ones; then twice what was left.
_SWEEP_ABOVE = 64


@dataclass(slots=True)
class _Debt:
    program: Program
    kv_blocks: int
    until_s: float


class RoomOwed:
    """Debts to programs, one each, in the order in which these stand."""

    def __init__(self) -> None:
        self._debts: SortedDict[_Place, _Debt] = SortedDict()
        self._places: dict[Program, _Place] = {}
        self._numbers = itertools.count()
        self._sweep_above = _SWEEP_ABOVE

    def __len__(self) -> int:
        return len(self._debts)

    def lost(self, pin: Pin, kv_blocks: int, now_s: float) -> None:
        """`pin` gave up `kv_blocks` under pressure."""
        program = pin.program
        if kv_blocks <= 0 or pin.owed_s <= 0.0 or program.ended:
            return
        known = self.settle(program)
        if known is not None and now_s < known.until_s:
            kv_blocks += known.kv_blocks
        place = (pin.rank, next(self._numbers))
        self._places[program] = place
        self._debts[place] = _Debt(program, kv_blocks, now_s + pin.owed_s)
        if len(self) > self._sweep_above:
            self._sweep(now_s)

    def settle(self, program: Program) -> _Debt | None:
        """Its next turn has its memory, or there will be none."""
        place = self._places.pop(program, None)
        return None if place is None else self._debts.pop(place)

    def clear(self) -> None:
        """All KV is gone: nobody has anything to come back to."""
        self._debts.clear()
        self._places.clear()

    def blocks(self, now_s: float) -> int:
        """Owed to all programs together."""
        owed = (d.kv_blocks for d in self._debts.values() if now_s < d.until_s)
        return sum(owed)

    def leaves_room(
        self, program: Program, rank: Rank, spare_blocks: float, now_s: float
    ) -> bool:
        """Whether what is owed to programs before `rank` fits into `spare_blocks`.

        Debts to other tenants do not count. Negative spare blocks are not judged here:
        what lacks them gets no more than it takes from pins behind it. Reads no more
        debts than fit, but for lapsed ones and other tenants'.
        """
        if spare_blocks < 0:
            return True
        owed_blocks = 0
        for (theirs, _), debt in self._debts.items():
            if theirs >= rank or owed_blocks > spare_blocks:
                break
            if now_s >= debt.until_s or debt.program is program:
                continue
            if debt.program.tenant == program.tenant:
                owed_blocks += debt.kv_blocks
        return owed_blocks <= spare_blocks

    def _sweep(self, now_s: float) -> None:
        for debt in [d for d in self._debts.values() if now_s >= d.until_s]:
            self.settle(debt.program)
        self._sweep_above = max(_SWEEP_ABOVE, 2 * len(self))
