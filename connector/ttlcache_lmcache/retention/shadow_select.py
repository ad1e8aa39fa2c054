"""Which ranking rules: the one whose shadow of L1 hits more.

Every ranking runs an L1 of its own that holds no bytes, only how many chunks of each
program it would have. Where gaps tell nothing, or mislead, last use takes over; so the
module is never much worse than the better of both. A shadow knows no shared prefixes:
they count once for every program, for all rankings alike.
"""

from __future__ import annotations

from collections.abc import Mapping

from ttlcache_lmcache.retention.lazy_ranking import Ranked
from ttlcache_lmcache.retention.program_table import ChainProgram
from ttlcache_lmcache.retention.rankings import Ranking

#: Of a hit's weight after one more lookup: about the last two hundred count.
_MEMORY = 0.995
#: A ranking takes over when its hits are so many times those of the one that rules.
_EDGE = 1.05


class Shadow:
    """An L1 under one ranking, in chunks."""

    def __init__(self, rank: Ranking) -> None:
        self.rank = rank
        self.hits = 0.0
        self._held: dict[ChainProgram, int] = {}
        self._used = 0
        self._ranked = Ranked(rank)  # those that hold something

    def looked_up(self, program: ChainProgram, chunks: int) -> None:
        self.hits = self.hits * _MEMORY + min(self._held.get(program, 0), chunks)

    def stored(self, program: ChainProgram, capacity: int, now_s: float) -> None:
        """A turn ended: its chunks get a place, as in admission.py."""
        self._ranked.look(now_s)
        chunks = len(program.chain)
        lack = chunks - self._held.get(program, 0)
        if lack < 0:
            self._set(program, chunks, now_s)
        over = lack - (capacity - self._used)
        if lack > 0 and over > 0:
            over -= self._make_room(program, over, now_s)
        if lack > 0:
            self._set(program, chunks - min(max(over, 0), lack), now_s)

    def _make_room(self, program: ChainProgram, lack: int, now_s: float) -> int:
        limit, freed = self.rank(program, now_s), 0
        while freed < lack:
            first = self._ranked.at(0, now_s)
            if first is None or first[0] >= limit or first[1] is program:
                break
            held = self._held[first[1]]
            gone = min(held, lack - freed)
            self._set(first[1], held - gone, now_s)
            freed += gone
        return freed

    def _set(self, program: ChainProgram, chunks: int, now_s: float) -> None:
        self._used += chunks - self._held.pop(program, 0)
        if chunks > 0:
            self._held[program] = chunks
            if program not in self._ranked:
                self._ranked.put(program, now_s)
        else:
            self._ranked.remove(program)


class Experts:
    """Rankings by name; the first one rules until another does better."""

    def __init__(self, rankings: Mapping[str, Ranking]) -> None:
        self._shadows = {name: Shadow(rank) for name, rank in rankings.items()}
        self.ruling = next(iter(rankings))

    @property
    def rank(self) -> Ranking:
        return self._shadows[self.ruling].rank

    def looked_up(self, program: ChainProgram) -> None:
        for shadow in self._shadows.values():
            shadow.looked_up(program, len(program.chain))
        best = max(self._shadows, key=lambda name: self._shadows[name].hits)
        if self._shadows[best].hits > _EDGE * self._shadows[self.ruling].hits:
            self.ruling = best

    def stored(self, program: ChainProgram, capacity: int, now_s: float) -> None:
        for shadow in self._shadows.values():
            shadow.stored(program, capacity, now_s)

    def hits(self) -> dict[str, float]:
        """Chunks that each would have hit lately."""
        return {name: round(each.hits, 1) for name, each in self._shadows.items()}
