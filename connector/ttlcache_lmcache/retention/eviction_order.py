"""What leaves L1 next: kept as things change, so that nobody has to look at everything.

The order of programs is a `Ranking`. Of one program the tail goes before the prefix,
and what programs share goes with the last of them. Chunks in L1 that are no program's
go by their last use.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterator

from sortedcontainers import SortedDict, SortedList

from ttlcache_lmcache.retention.program_table import ChainProgram, Chunk, ProgramTable
from ttlcache_lmcache.retention.rankings import Rank, Ranking, of_unowned
from ttlcache_lmcache.retention.residency import Residency

#: Programs taken in at a call, when many are new to the order at once.
_TAKEN_IN = 64
#: Programs ranked anew at a call, in turn.
SLICE = 8
#: Programs ranked anew at a call because it is theirs to go.
_CHECKS = 32
#: Of a program that was forgotten: before all others.
_FORGOTTEN: Rank = (-1, 0.0, 0.0)


class Ranked:
    """Programs, the one to go first at the front. Not thread-safe.

    Ranks change with time by themselves. To rank all programs takes the longer the more
    there are, under the tier's lock; so the order is a little out of date: every call
    ranks a few programs anew, those first that were not for the longest. Between two
    turns of one of n programs come about n turns of others, with several calls each:
    its rank is looked at some dozen times meanwhile, however large n is.
    """

    def __init__(self, rank: Ranking) -> None:
        self.rank = rank
        self._order: SortedList[tuple[Rank, int, ChainProgram]] = SortedList()
        #: When each was ranked, and how; the one not ranked for longest first.
        self._known: OrderedDict[ChainProgram, tuple[Rank, float]] = OrderedDict()
        self._checks = 0

    def __contains__(self, program: ChainProgram) -> bool:
        return program in self._known

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


class UnownedChunks:
    """Chunks in L1 that are no program's, by last use. Not thread-safe."""

    def __init__(self) -> None:
        self._order: SortedDict[tuple[float, int], Chunk] = SortedDict()
        self._places: dict[Chunk, tuple[float, int]] = {}
        self._numbers = itertools.count(0, -1)

    def __contains__(self, chunk: Chunk) -> bool:
        return chunk in self._places

    def put(self, chunk: Chunk, used_s: float) -> None:
        self.remove(chunk)
        # Contexts are put from their start on: of one moment the tail goes first.
        place = self._places[chunk] = (used_s, next(self._numbers))
        self._order[place] = chunk

    def remove(self, chunk: Chunk) -> None:
        place = self._places.pop(chunk, None)
        if place is not None:
            del self._order[place]

    def in_order(self) -> Iterator[tuple[float, Chunk]]:
        """With the times of their last use, the longest unused first."""
        return ((used_s, chunk) for (used_s, _), chunk in self._order.items())


class EvictionOrder:
    """The book and L1, and the order of what is in both. Not thread-safe: the tier
    locks.

    In the order are the programs that may have something to give: whoever has is found,
    for the last that holds a chunk is taken in when it is in the way of another one.
    """

    def __init__(self, max_programs: int, rank: Ranking) -> None:
        self.book = ProgramTable(max_programs, self)
        self.residency = Residency(self)
        self.rank = rank
        self._ranked = Ranked(rank)
        self._woken: dict[ChainProgram, None] = {}
        self._unowned = UnownedChunks()

    # what changes

    def entered(self, chunk: Chunk, used_s: float) -> None:
        holder = self.book.last_holder(chunk)
        if holder is None:
            self._unowned.put(chunk, used_s)
        else:
            self._woken[holder] = None

    def used(self, chunk: Chunk, now_s: float) -> None:
        if chunk in self._unowned:
            self._unowned.put(chunk, now_s)

    def left(self, chunk: Chunk) -> None:
        self._unowned.remove(chunk)

    def held(self, chunk: Chunk) -> None:
        self._unowned.remove(chunk)

    def freed(self, chunk: Chunk) -> None:
        used_s = self.residency.used_s(chunk)
        if used_s is not None:
            self._unowned.put(chunk, used_s)

    def changed(self, program: ChainProgram) -> None:
        self._woken[program] = None

    def forgot(self, program: ChainProgram) -> None:
        self._woken.pop(program, None)
        self._ranked.remove(program)

    # what leaves

    def look(self, now_s: float) -> None:
        """A call begins: bring the order a little nearer to the truth."""
        for _ in range(min(_TAKEN_IN, len(self._woken))):
            program = next(iter(self._woken))
            del self._woken[program]
            self._ranked.put(program, now_s)
        self._ranked.look(now_s)

    def chunks(self, now_s: float) -> Iterator[tuple[Rank, ChainProgram | None, Chunk]]:
        """Every chunk in L1 once, in the order in which they should go.

        Whatever is not deleted is there again at the next call. While one is under
        way, nothing may change.
        """
        strays = self._unowned.in_order()
        stray, place = next(strays, None), 0
        while True:
            first = self._ranked.at(place, now_s)
            if stray is not None:
                rank = of_unowned(stray[0], now_s)
                if first is None or rank < first[0]:
                    yield rank, None, stray[1]
                    stray = next(strays, None)
                    continue
            if first is None:
                return
            rank, program = first
            gives = False
            for chunk in self._own(program, rank, now_s):
                gives = True
                yield rank, program, chunk
            if gives:
                place += 1
            else:
                self._ranked.remove(program)  # nothing to give until something changes

    def _own(self, program: ChainProgram, rank: Rank, now_s: float) -> Iterator[Chunk]:
        """The program's chunks in L1 that none with a higher rank has, too."""
        for chunk in reversed(program.chain):
            if not self.residency.has(chunk):
                continue
            above = self._above(chunk, program, rank, now_s)
            if above is not None:
                if above not in self._ranked:
                    self._ranked.put(above, now_s)  # behind this one
                return  # it has all that lies before the chunk, too
            yield chunk

    def _above(
        self, chunk: Chunk, program: ChainProgram, rank: Rank, now_s: float
    ) -> ChainProgram | None:
        for each in self.book.holders(chunk):
            if each is not program and self._ranked.rank_of(each, now_s) > rank:
                return each
        return None
