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
