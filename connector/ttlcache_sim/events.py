"""Future events of a cell, in order of virtual time."""

from __future__ import annotations

import heapq
import itertools
from typing import Generic, TypeVar

T = TypeVar("T")


class EventQueue(Generic[T]):
    """A heap of (seconds, item); equal times come out in order of insertion."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, T]] = []
        self._count = itertools.count()

    def push(self, time_s: float, item: T) -> None:
        heapq.heappush(self._heap, (time_s, next(self._count), item))

    def pop_due(self, now_s: float) -> tuple[float, T] | None:
        """The earliest item whose time has come, or None."""
        if not self._heap or self._heap[0][0] > now_s:
            return None
        time_s, _, item = heapq.heappop(self._heap)
        return time_s, item

    def next_s(self) -> float | None:
        return self._heap[0][0] if self._heap else None
