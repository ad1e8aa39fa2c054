"""How much of L1 must be free for what nobody announces.

LMCache evicts a fixed share (a fifth) of everything once a second when L1 is fuller
than its watermark (four fifths): on average a quarter of L1 stays empty. Stores that
find no room are dropped, so some must be free. What a request under way will write is
known from its lookup; this is about the rest: what it generates, requests that are over
before anybody looks, and the turns of an engine that looks up little.
"""

from __future__ import annotations

#: Room for so many times the largest burst lately.
_MARGIN = 1.5
#: Of a burst's weight after one more look without its like.
_MEMORY = 0.98
#: Least and most free objects as shares of those that fit. More is not worth it: a
#: store that is dropped costs no more than what had to go for it.
_LEAST, _MOST = 0.01, 0.25


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

    def wanted(self, capacity: float) -> float:
        """Objects that should be free where so many fit."""
        burst = max(self._burst, float(self._now))
        return min(max(_MARGIN * burst, _LEAST * capacity), _MOST * capacity)
