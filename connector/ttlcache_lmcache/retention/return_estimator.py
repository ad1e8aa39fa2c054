"""How soon an idle program's KV is wanted again, from the gaps seen so far.

The worth of a place in L1 is the next hit that it yields, and less the longer that
takes: E[exp(-T / horizon)], where T is the time to the program's next lookup, given
how long it has been silent. A program that never returns has T = infinity: those that
nobody said had ended fade out by themselves, as fast as the others' gaps allow.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import NamedTuple

import numpy as np

from ttlcache.estimators.gap_history import GapHistory
from ttlcache.estimators.sliding_mean import SlidingMean
from ttlcache.estimators.survival import SurvivalCurve
from ttlcache.types import GapKey
from ttlcache_lmcache.retention.program_table import ChainProgram

#: Everybody's worth while no gap has ended yet.
UNKNOWN = 0.5
#: A tool has a curve of its own above so many gaps; below it all tools share one.
_MIN_RECORDS = 20
#: Steps of a curve that are looked at; a finer one is thinned out.
_MAX_STEPS = 512
_WINDOW = 1000
#: Seconds for which a curve is good: gaps are no shorter than that by much.
_CURVE_AGE_S = 0.25
#: Curves drawn at one moment; the others stay as they are. Bounds what a call takes.
_DRAWN_AT_ONCE = 4
#: Curves kept, the ones drawn last.
_MAX_CURVES = 1024


class ReturnCurve:
    """E[exp(-(T - w) / horizon) | T > w] of one survival curve, for every w."""

    def __init__(self, curve: SurvivalCurve, horizon_s: float) -> None:
        stride = max(1, math.ceil(len(curve.times) / _MAX_STEPS))
        # From the end, so that the last step, what never returns, is always there.
        times, left = curve.times[::-1][::stride], curve.survival[::-1][::stride]
        before = np.append(left[1:], 1.0)
        with np.errstate(divide="ignore"):  # nobody returns at a step: log 0
            shares = np.log(np.maximum(before - left, 0.0))
        # Logarithms: a silence of many horizons would leave nothing but zeros.
        sums = np.logaddexp.accumulate(shares - times / horizon_s)
        self._times: list[float] = times[::-1].tolist()
        self._left: list[float] = before[::-1].tolist()  # until this step
        self._log_sums: list[float] = sums[::-1].tolist()  # of this step and later ones
        self._horizon_s = horizon_s

    def after(self, waited_s: float) -> float:
        """The worth of a program that has been silent for `waited_s`."""
        step = bisect_right(self._times, waited_s)
        if step == len(self._times) or self._left[step] <= 0.0:
            return 0.0
        log_sum = self._log_sums[step] + waited_s / self._horizon_s
        return math.exp(log_sum) / self._left[step]


class _Drawn(NamedTuple):
    curve: ReturnCurve | None
    at_s: float


class ReturnEstimator:
    """The worth of programs. Not thread-safe."""

    def __init__(self) -> None:
        self._gaps = GapHistory()
        self._gap_s = SlidingMean(_WINDOW)
        self._service_s = SlidingMean(_WINDOW)
        self._curves: dict[GapKey | None, _Drawn] = {}  # the ones drawn last at the end
        self._now_s = -math.inf
        self._may_draw = 0

    @property
    def gaps_recorded(self) -> int:
        return self._gaps.count()

    def gap_begins(self, program: ChainProgram, now_s: float) -> None:
        self._gaps.start(program.number, program.gap_key, now_s)

    def gap_ends(self, program: ChainProgram, now_s: float) -> None:
        """The program's next turn is here: learn from how long it was away."""
        gap_s = self._gaps.finish(program.number, now_s)
        if gap_s is not None:
            self._gap_s.observe(gap_s)

    def gap_lost(self, program: ChainProgram, now_s: float) -> None:
        """The program is forgotten: its gap lasted this long at least."""
        self._gaps.abandon(program.number, now_s)

    def no_gap(self, program: ChainProgram) -> None:
        """No turn follows: nothing to learn from."""
        self._gaps.drop(program.number)

    def observe_service(self, seconds: float) -> None:
        """So long a turn took, from its lookup to its end."""
        self._service_s.observe(seconds)

    def worth(self, program: ChainProgram, now_s: float) -> float:
        """From 0, never wanted again, to 1, wanted now."""
        if program.is_running(now_s):
            left_s = max(self._service_s.value - (now_s - program.seen_s), 0.0)
            curve = self._curve(None, now_s)
            if curve is None:
                return UNKNOWN
            return curve.after(0.0) * math.exp(-left_s / self._horizon_s)
        key = self._gaps.best_key(program.gap_key, _MIN_RECORDS, True)
        curve = self._curve(key, now_s)
        return UNKNOWN if curve is None else curve.after(now_s - program.since_s)

    @property
    def _horizon_s(self) -> float:
        """One round of a typical program."""
        return max(self._gap_s.value + self._service_s.value, 1e-3)

    def _curve(self, key: GapKey | None, now_s: float) -> ReturnCurve | None:
        if now_s != self._now_s:
            self._now_s, self._may_draw = now_s, _DRAWN_AT_ONCE
        drawn = self._curves.get(key)
        if drawn is None and key is not None and self._may_draw <= 0:
            return self._curve(None, now_s)
        if drawn is None or (self._may_draw > 0 and now_s - drawn.at_s >= _CURVE_AGE_S):
            self._may_draw -= 1
            drawn = self._draw(key, now_s)
        return drawn.curve

    def _draw(self, key: GapKey | None, now_s: float) -> _Drawn:
        curve = self._gaps.survival(key, now_s)
        known = len(curve.times) > 0
        drawn = _Drawn(ReturnCurve(curve, self._horizon_s) if known else None, now_s)
        self._curves.pop(key, None)
        self._curves[key] = drawn
        if len(self._curves) > _MAX_CURVES:
            del self._curves[next(iter(self._curves))]
        return drawn
