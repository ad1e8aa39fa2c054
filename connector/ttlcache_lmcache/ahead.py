"""Room made ahead of stores, where nobody asks at the store itself.

A lookup tells what its request is about to write; for the rest some headroom is kept.
"""

from __future__ import annotations

from collections.abc import Iterable

from ttlcache_lmcache.headroom import Headroom
from ttlcache_lmcache.order import Queue, chunks_to_come, chunks_without_place
from ttlcache_lmcache.programs import ProgramBook
from ttlcache_lmcache.residency import ObjectKey, Residency, chunk_of


class RoomAhead:
    """Not thread-safe: the tier locks."""

    def __init__(self, book: ProgramBook, residency: Residency) -> None:
        self._book = book
        self._residency = residency
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
        to_come = chunks_to_come(self._book, self._residency) * a_chunk
        return self._residency.num_l1 + to_come > self._room(capacity)

    def without_place(self, entries: Queue, capacity: float) -> list[ObjectKey]:
        """What has to go: abandoned writes, and what is worth least."""
        keys = self._residency.reserved()
        places = int(self._room(capacity) / self._residency.objects_a_chunk)
        for chunk in chunks_without_place(entries, self._residency, places):
            keys.extend(self._residency.objects(chunk))
        return keys

    def _room(self, capacity: float) -> float:
        return capacity - self._headroom.wanted(capacity)
