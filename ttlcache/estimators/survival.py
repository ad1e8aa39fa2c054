"""Small online estimators: sliding mean, memoryfulness, Kaplan-Meier, bounds.

Everything here is arithmetic on numbers handed in: no clock, no keys, no policy.
"""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

FloatArray: TypeAlias = npt.NDArray[np.float64]
IntArray: TypeAlias = npt.NDArray[np.int64]
#: Up to so many elements, a numpy call costs more than what it computes.
_FEW = 1024


class SlidingMean:
    """Mean of the last `window` observations; 0.0 while there are none."""

    def __init__(self, window: int) -> None:
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

    @property
    def value(self) -> float:
        return self._sum / len(self._ring) if self._ring else 0.0

    @property
    def count(self) -> int:
        return len(self._ring)


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


class SurvivalCurve(NamedTuple):
    """Right-continuous step function S(t) = P(T > t), with its running integral.

    times: event times in seconds, ascending, ties allowed; S steps there only.
    survival: S just after each time.
    held_s: E[min(T, t)] at each time: what a pin of that TTL costs on average.
    All three are read-only.
    """

    times: FloatArray
    survival: FloatArray
    held_s: FloatArray

    def at(self, seconds: float) -> float:
        index = int(self.times.searchsorted(seconds, side="right"))
        return float(self.survival[index - 1]) if index else 1.0

    def restricted_mean(self, tau_s: float) -> float:
        """E[min(T, tau)]: the area under S up to `tau_s`."""
        index = int(self.times.searchsorted(tau_s, side="right"))
        if index == 0:
            return max(tau_s, 0.0)
        since_s = tau_s - float(self.times[index - 1])
        left = float(self.survival[index - 1])
        # 0 * inf: nobody is left, so waiting for ever adds nothing.
        tail_s = since_s * left if left > 0.0 else 0.0
        return float(self.held_s[index - 1]) + tail_s

    def given_survival(self, waited_s: float) -> SurvivalCurve:
        """The curve of T - waited_s for those with T > waited_s.

        Empty (S = 1 for ever) where nobody is known to have lasted longer.
        """
        if waited_s <= 0.0:
            return self
        index = int(self.times.searchsorted(waited_s, side="right"))
        left = self.at(waited_s)
        if left <= 0.0:
            return EMPTY_CURVE
        return SurvivalCurve(
            self.times[index:] - waited_s,
            self.survival[index:] / left,
            (self.held_s[index:] - self.restricted_mean(waited_s)) / left,
        )


def read_only(values: FloatArray) -> FloatArray:
    values.setflags(write=False)
    return values


EMPTY = read_only(np.empty(0))
EMPTY_CURVE = SurvivalCurve(EMPTY, EMPTY, EMPTY)


def survival_of_sorted(events: FloatArray, censored: FloatArray) -> SurvivalCurve:
    """Product-limit estimate from two ascending arrays; O(n + c log n).

    One step per event, ties included: the product over d tied events of
    1 - 1/at_risk telescopes to Kaplan and Meier's 1 - d/at_risk. A censoring at
    an event's time still counts as at risk there.
    """
    n = len(events)
    if n == 0:
        return EMPTY_CURVE
    survival: FloatArray
    if len(censored) == 0:
        survival = np.arange(n - 1, -1, -1, dtype=np.float64) / n
    else:
        records = n + len(censored)
        at_risk = np.arange(records, records - n, -1) - _count_below(censored, events)
        survival = 1.0 - 1.0 / at_risk
        np.multiply.accumulate(survival, out=survival)
    # Area of each step: the survival before the event times the step's width.
    areas: FloatArray = events.copy()
    widths = areas[1:]
    widths -= events[:-1]
    widths *= survival[:-1]
    np.add.accumulate(areas, out=areas)
    return SurvivalCurve(events, read_only(survival), read_only(areas))


def _count_below(values: FloatArray, bounds: FloatArray) -> IntArray:
    """How many of `values` are smaller, for each of `bounds`; both ascending."""
    if len(bounds) <= _FEW:  # fewer calls, but a search for each bound
        return values.searchsorted(bounds)
    places = bounds.searchsorted(values, side="right")
    return np.bincount(places, minlength=len(bounds))[: len(bounds)].cumsum()
