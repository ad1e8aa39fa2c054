"""Programs in order of rank, at the cost of a few programs a call.

Ranks change with time by themselves. To rank all programs takes the longer the more
there are, under the tier's lock; so the order is a little out of date: every call ranks
a few programs anew, those first that were not for the longest. Between two turns of
one of n programs come about n turns of others, with several calls each: its rank is
looked at some dozen times meanwhile, however large n is.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from sortedcontainers import SortedList

from ttlcache_lmcache.retention.program_table import ChainProgram
from ttlcache_lmcache.retention.rankings import Rank, Ranking

#: Programs ranked anew at a call, in turn.
SLICE = 8
#: Programs ranked anew at a call because it is theirs to go.
_CHECKS = 32
#: Of a program that was forgotten: before all others.
_FORGOTTEN: Rank = (-1, 0.0, 0.0)


class Ranked:
    """Some programs, the one to go first at the front. Not thread-safe."""

    def __init__(self, rank: Ranking) -> None:
        self.rank = rank
        self._order: SortedList[tuple[Rank, int, ChainProgram]] = SortedList()
        #: When each was ranked, and how; the one not ranked for longest first.
        self._known: OrderedDict[ChainProgram, tuple[Rank, float]] = OrderedDict()
        self._checks = 0

    def __contains__(self, program: ChainProgram) -> bool:
        return program in self._known

    def programs(self) -> Iterable[ChainProgram]:
        return self._known.keys()

    def put(self, program: ChainProgram, now_s: float) -> Rank:
        """Rank a program as it stands now, a new one or a known one."""
        rank = self.rank(program, now_s) if program.chain else _FORGOTTEN
        known = self._known.pop(program, None)
        if known is None or known[0] != rank:
            if known is not None:
                self._order.remove((known[0], program.number, program))
            self._order.add((rank, program.number, program))
        self._known[program] = (rank, now_s)
        return rank

    def remove(self, program: ChainProgram) -> None:
        known = self._known.pop(program, None)
        if known is not None:
            self._order.remove((known[0], program.number, program))

    def rank_of(self, program: ChainProgram, now_s: float) -> Rank:
        """As it was ranked last; as it stands now, if it is none of these."""
        known = self._known.get(program)
        return known[0] if known is not None else self.rank(program, now_s)

    def look(self, now_s: float) -> None:
        """A call begins: rank a few anew."""
        self._checks = _CHECKS
        for _ in range(min(SLICE, len(self._known))):
            self.put(next(iter(self._known)), now_s)

    def at(self, place: int, now_s: float) -> tuple[Rank, ChainProgram] | None:
        """The one at a place from the front; None if there are not so many.

        Ranked anew before it is shown, and put back where that makes it worth more.
        """
        while place < len(self._order):
            before, _, program = self._order[place]
            if self._checks <= 0 or self._known[program][1] == now_s:
                return before, program
            self._checks -= 1
            rank = self.put(program, now_s)
            if rank <= before:
                return rank, program
        return None
