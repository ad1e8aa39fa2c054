"""Whether programs that made many turns have few left."""

from __future__ import annotations

import math
from collections import deque


class Memoryfulness:
    """eta = -Corr(k, N - k) over finished programs (CacheTTL v4 §4.1).

    k is the number of turns a program has made, N - k those it still makes. 1 for
    constant lengths, 0 for geometric ones, negative for heavy tails. Kept for the
    last `window` programs in O(1) per program by closed-form sums. Where the
    correlation is undefined (no program, or no variance) it is 1.0, the paper's
    cold-start assumption.
    """

    def __init__(self, window: int = 1000) -> None:
        self._turns: deque[int] = deque(maxlen=window)
        # Sums of N, N^2 and N^3 over the window; integers, so exact for ever.
        self._sums = [0, 0, 0]
        self._eta: float | None = None

    def add(self, turns: int) -> None:
        """A program ended after `turns` turns; fewer than 1 is ignored."""
        if turns < 1:
            return
        if len(self._turns) == self._turns.maxlen:
            self._count(self._turns[0], -1)
        self._turns.append(turns)
        self._count(turns, +1)
        self._eta = None

    def _count(self, turns: int, sign: int) -> None:
        for power in range(3):
            self._sums[power] += sign * turns ** (power + 1)

    @property
    def eta(self) -> float:
        if self._eta is None:
            self._eta = self._correlate()
        return self._eta

    def _correlate(self) -> float:
        # Sums over all pairs (k, m = N - k), k = 1..N, of 1, k, m, k k, m m and k m.
        pairs, squares, cubes = self._sums
        k, m = (squares + pairs) // 2, (squares - pairs) // 2
        kk = (2 * cubes + 3 * squares + pairs) // 6
        mm = (2 * cubes - 3 * squares + pairs) // 6
        km = (cubes + squares) // 2 - kk
        var_k = pairs * kk - k * k
        var_m = pairs * mm - m * m
        if var_k <= 0 or var_m <= 0:
            return 1.0
        covariance = pairs * km - k * m
        corr = covariance / (math.sqrt(var_k) * math.sqrt(var_m))
        return -max(-1.0, min(1.0, corr))

    @property
    def avg_turns(self) -> float:
        """Mean turns of the programs in the window, 0.0 while there are none."""
        return self._sums[0] / len(self._turns) if self._turns else 0.0
