"""Room made ahead of stores, where nobody asks at the store itself.

A lookup tells what its request is about to write; for the rest some headroom is kept.
"""

from __future__ import annotations

from collections.abc import Iterable

from ttlcache_lmcache.retention.eviction_order import Leaving
from ttlcache_lmcache.retention.headroom import Headroom
from ttlcache_lmcache.retention.program_table import ChainProgram, Chunk, ProgramBook
from ttlcache_lmcache.retention.rankings import Rank
from ttlcache_lmcache.retention.residency import ObjectKey, Residency, chunk_of


class RoomAhead:
    """Not thread-safe: the tier locks."""

    def __init__(
        self, book: ProgramBook, residency: Residency, leaving: Leaving
    ) -> None:
        self._book = book
        self._residency = residency
        self._leaving = leaving
        self._headroom = Headroom()
        self._looked_s = float("-inf")

    def look(self, now_s: float) -> None:
        self._headroom.look()
        self._looked_s = now_s

    def wrote(self, keys: Iterable[ObjectKey]) -> None:
        self._headroom.wrote(sum(not self._is_announced(key) for key in keys))

    def _is_announced(self, key: ObjectKey) -> bool:
        """Whether room was made for it: its request was under way at the last look."""
        return any(
            each.running and each.seen_s <= self._looked_s
            for each in self._book.holders(chunk_of(key))
        )

    def is_needed(self, capacity: float) -> bool:
        a_chunk = self._residency.objects_a_chunk
        seen: set[Chunk] = set()
        to_come = sum(self._to_come(p, seen) for p in self._book.under_way())
        return self._residency.num_l1 + to_come * a_chunk > self._room(capacity)

    def _to_come(self, program: ChainProgram, seen: set[Chunk]) -> int:
        """Chunks of a request under way that L1 lacks and nobody in `seen` writes."""
        lacking = [chunk for chunk in program.chain if not self._residency.has(chunk)]
        before = len(seen)
        seen.update(lacking)
        return len(seen) - before

    def without_place(self, capacity: float, now_s: float) -> list[ObjectKey]:
        """What has to go: abandoned writes, and what is worth least.

        Places are given from the most worth down, also to what requests under way are
        about to write: a program makes room for those that go before it, never for
        one that is worth less.
        """
        keys = self._residency.reserved()
        places = int(self._room(capacity) / self._residency.objects_a_chunk)
        coming = self._coming(now_s)
        over = self._residency.num_chunks + sum(n for _, n in coming) - places
        for rank, _, chunk in self._leaving.chunks(now_s):
            while coming and coming[-1][0] <= rank:
                over -= coming.pop()[1]  # finds no place itself
            if over <= 0:
                break
            keys.extend(self._residency.objects(chunk))
            over -= 1
        return keys

    def _coming(self, now_s: float) -> list[tuple[Rank, int]]:
        """Ranks of requests under way, the highest first, and what they will write."""
        running = [
            (self._leaving.rank_of(each, now_s), each)
            for each in self._book.under_way()
        ]
        running.sort(key=lambda entry: entry[0], reverse=True)
        seen: set[Chunk] = set()
        return [(rank, self._to_come(each, seen)) for rank, each in running]

    def _room(self, capacity: float) -> float:
        return capacity - self._headroom.wanted(capacity)
