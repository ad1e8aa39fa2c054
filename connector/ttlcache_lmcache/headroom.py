"""How much of L1 must be free until the next look.

LMCache evicts a fixed share (a fifth) of everything once a second when L1 is fuller
than its watermark (four fifths): on average a quarter of L1 stays empty. Stores that
find no room are dropped, so some must be free, but only as much as is written between
two looks.
"""

from __future__ import annotations

import math

#: Room for so many times the largest burst lately.
_MARGIN = 1.5
#: Of a burst's weight after one more look without its like.
_MEMORY = 0.98
#: Least and most free objects as shares of those that fit. More is not worth it: a
#: store that is dropped costs no more than what had to go for it.
_LEAST, _MOST = 0.04, 0.25


class Headroom:
    """Tracks bursts of writes, in objects."""

    def __init__(self) -> None:
        self._burst = 0.0
        self._now = 0

    def wrote(self, objects: int) -> None:
        self._now += objects

    def look(self) -> None:
        """One interval is over."""
        self._burst = max(self._burst * _MEMORY, float(self._now))
        self._now = 0

    def missing(self, objects: int, used: float) -> int:
        """Objects to evict now.

        Args:
            objects: how many are in L1.
            used: the share of L1 that they take.
        """
        if objects <= 0 or used <= 0.0:
            return 0
        capacity = objects / used
        burst = max(self._burst, float(self._now))
        wanted = min(max(_MARGIN * burst, _LEAST * capacity), _MOST * capacity)
        return max(0, math.ceil(objects - (capacity - wanted)))
