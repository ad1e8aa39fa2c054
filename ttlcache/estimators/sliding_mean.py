"""The mean of the last observations."""

from __future__ import annotations

import math
from collections import deque


class SlidingMean:
    """`value`: the mean of the last `window` observations; 0.0 while there are none."""

    def __init__(self, window: int) -> None:
        self.value = 0.0  # read more often than written
        self._ring: deque[float] = deque(maxlen=window)
        self._sum = 0.0
        self._until_resum = window

    def observe(self, value: float) -> None:
        if len(self._ring) == self._ring.maxlen:
            self._sum -= self._ring[0]
        self._ring.append(value)
        self._sum += value
        self._until_resum -= 1
        if self._until_resum <= 0:
            # Adding and subtracting floats drifts; one exact sum per window is O(1).
            self._sum = math.fsum(self._ring)
            self._until_resum = len(self._ring)
        self.value = self._sum / len(self._ring)

    @property
    def count(self) -> int:
        return len(self._ring)
