"""Survival curves of tool gaps, by Kaplan and Meier's product-limit estimate."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

FloatArray: TypeAlias = npt.NDArray[np.float64]
IntArray: TypeAlias = npt.NDArray[np.int64]
#: Up to so many elements, a numpy call costs more than what it computes.
_FEW = 1024


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
