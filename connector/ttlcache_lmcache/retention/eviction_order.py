"""What leaves L1 next: kept as things change, so that nobody has to look at everything.

What a client said comes first: finished programs go before all others, those past a
TTL that a client set go next, those inside it last. All others go by expected return.
Of one program the tail goes before the prefix, and what programs share goes with the
last of them. Chunks in L1 that are no program's go by their last use.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import TypeAlias

from sortedcontainers import SortedDict

from ttlcache_lmcache.retention.program_table import ChainProgram, ProgramTable
from ttlcache_lmcache.retention.residency import Chunk, ObjectKey, Residency
from ttlcache_lmcache.retention.return_estimator import ReturnEstimator

#: What is less goes first: the kind, the worth within it, and what settles ties. No two
#: programs have the same one.
Rank: TypeAlias = tuple[int, float, float]
Leaving: TypeAlias = tuple[Rank, ChainProgram | None, Chunk]

_FINISHED, _UNOWNED, _EXPIRED, _FRESH_UNOWNED, _KEPT, _TOLD = range(6)

#: A chunk of no program is given this long to be claimed by one: what a request
#: generates is known to be its program's only when the request ends.
_GRACE_S = 30.0
#: Programs ranked anew at a call, in turn, and so many because it is theirs to go.
SLICE = 8


def of_unowned(used_s: float, now_s: float) -> Rank:
    """A chunk in L1 that is no known program's."""
    is_fresh = now_s - used_s < _GRACE_S
    return (_FRESH_UNOWNED if is_fresh else _UNOWNED, used_s, 0.0)


class EvictionOrder:
    """The programs, L1, and the order of what is in both. Not thread-safe.

    Ranks change with time by themselves. To rank all programs takes the longer the more
    there are, under the tier's lock; so the order is a little out of date: every call
    ranks a few programs anew, those that were not for the longest and, where something
    has to leave, those at the front. Between two turns of one of n programs come about
    n turns of others, with several calls each: its rank is looked at some dozen times
    meanwhile, however large n is.

    In the order are the programs that may have something to give: whoever has is found,
    for the last that holds a chunk is taken in when it is in the way of another one.
    """

    def __init__(self, max_programs: int, returns: ReturnEstimator) -> None:
        self.residency = Residency()
        self.book = ProgramTable(max_programs, self.residency)
        self._returns = returns
        self._order: SortedDict[Rank, ChainProgram] = SortedDict()
        #: The same programs, the one not ranked for longest first.
        self._ranked: OrderedDict[ChainProgram, Rank] = OrderedDict()

    def rank(self, program: ChainProgram, now_s: float) -> Rank:
        """By expected return; of equals the oldest program goes last."""
        kind = _kind_of(program, now_s)
        worth = program.seen_s if kind < _KEPT else self._returns.worth(program, now_s)
        return (kind, worth, -float(program.number))

    def written(self, keys: Sequence[ObjectKey], now_s: float) -> None:
        """L1 has these objects now."""
        for chunk in self.residency.write(keys, now_s):
            holder = next(reversed(self.book.holders(chunk)), None)
            if holder is None:
                self.residency.disown(chunk)
            else:
                self.book.changed[holder] = None

    def look(self, now_s: float) -> None:
        """A call begins: take in what changed, and bring the order nearer to the
        truth."""
        for program in self.book.changed:
            if program.chain:
                self._put(program, now_s)
            else:  # forgotten, or of less than a chunk
                self._remove(program)
                if program not in self.book:
                    self._returns.gap_lost(program, now_s)
        self.book.changed.clear()
        for _ in range(min(SLICE, len(self._ranked))):
            self._put(next(iter(self._ranked)), now_s)

    def chunks(self, now_s: float) -> Iterator[Leaving]:
        """Every chunk in L1 once, in the order in which they should go.

        Whatever is not deleted is there again at the next call. While one is under
        way, nothing may change.
        """
        unowned = self.residency.unowned()
        nobodys = ((of_unowned(used, now_s), None, chunk) for used, chunk in unowned)
        return heapq.merge(nobodys, self._owned(now_s), key=itemgetter(0))

    def _owned(self, now_s: float) -> Iterator[Leaving]:
        """Those that programs have."""
        for program in self._order.values()[:SLICE]:
            self._put(program, now_s)
        place = 0
        shown: set[Chunk] = set()
        while place < len(self._order):
            rank, program = self._order.peekitem(place)
            gives = False
            for chunk in self._own(program, rank, now_s):
                gives = True
                # A program taken in meanwhile may have moved this one.
                if chunk not in shown:
                    shown.add(chunk)
                    yield rank, program, chunk
            if gives:
                place += 1
            else:
                self._remove(program)  # nothing to give until something changes

    def _own(self, program: ChainProgram, rank: Rank, now_s: float) -> Iterator[Chunk]:
        """The program's chunks in L1 that none with a higher rank has, too."""
        for chunk in filter(self.residency.has, reversed(program.chain)):
            for each in self.book.holders(chunk):
                if (self._ranked.get(each) or self.rank(each, now_s)) > rank:
                    if each not in self._ranked:
                        self._put(each, now_s)  # behind this one
                    return  # it has all that lies before the chunk, too
            yield chunk

    # ranked programs

    def _put(self, program: ChainProgram, now_s: float) -> None:
        """Rank a program as it stands now, a new one or a known one."""
        self._remove(program)
        self._ranked[program] = rank = self.rank(program, now_s)
        self._order[rank] = program

    def _remove(self, program: ChainProgram) -> None:
        rank = self._ranked.pop(program, None)
        if rank is not None:
            del self._order[rank]


def _kind_of(program: ChainProgram, now_s: float) -> int:
    """What comes first of a rank."""
    if program.is_running(now_s):
        return _KEPT
    if program.is_finished:
        return _FINISHED
    if program.is_told:
        return _TOLD if program.is_in_ttl(now_s) else _EXPIRED
    return _KEPT
