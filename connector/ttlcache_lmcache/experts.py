"""Which ranking rules: the one whose shadow of L1 hits more.

Every ranking runs an L1 of its own that holds no bytes, only how many chunks of each
program it would have. Where gaps tell nothing, or mislead, last use takes over; so the
module is never much worse than the better of both. A shadow knows no shared prefixes:
they count once for every program, for all rankings alike.
"""

from __future__ import annotations

from collections.abc import Mapping

from ttlcache_lmcache.admission import ORDER_AGE_S
from ttlcache_lmcache.programs import ChainProgram
from ttlcache_lmcache.ranks import Rank, Ranking

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
        self._order: list[tuple[Rank, ChainProgram]] = []  # the first to go last
        self._ordered_s = float("-inf")

    def looked_up(self, program: ChainProgram, chunks: int) -> None:
        self.hits = self.hits * _MEMORY + min(self._held.get(program, 0), chunks)

    def stored(self, program: ChainProgram, capacity: int, now_s: float) -> None:
        """A turn ended: its chunks get a place, as in admission.py."""
        chunks = len(program.chain)
        lack = chunks - self._held.get(program, 0)
        if lack < 0:
            self._set(program, chunks)
        over = lack - (capacity - self._used)
        if lack > 0 and over > 0:
            over -= self._make_room(program, over, now_s)
        if lack > 0:
            self._set(program, chunks - min(max(over, 0), lack))

    def _make_room(self, program: ChainProgram, lack: int, now_s: float) -> int:
        if now_s - self._ordered_s > ORDER_AGE_S:
            self._put_in_order(now_s)
        limit, freed = self.rank(program, now_s), 0
        while self._order and freed < lack:
            rank, victim = self._order[-1]
            if rank >= limit or victim is program:
                break
            held = self._held.get(victim, 0)
            gone = min(held, lack - freed)
            self._set(victim, held - gone)
            freed += gone
            if gone == held:
                self._order.pop()
        return freed

    def _put_in_order(self, now_s: float) -> None:
        for program in [each for each in self._held if not each.chain]:
            self._set(program, 0)  # forgotten
        self._order = [(self.rank(each, now_s), each) for each in self._held]
        self._order.sort(key=lambda entry: entry[0], reverse=True)
        self._ordered_s = now_s

    def _set(self, program: ChainProgram, chunks: int) -> None:
        self._used += chunks - self._held.pop(program, 0)
        if chunks > 0:
            self._held[program] = chunks


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
