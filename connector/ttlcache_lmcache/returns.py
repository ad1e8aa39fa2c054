"""How soon an idle program's KV is wanted again, from the gaps seen so far.

The worth of a place in L1 is the next hit that it yields, and less the longer that
takes: E[exp(-T / horizon)], where T is the time to the program's next lookup, given
how long it has been silent. A program that never returns has T = infinity: those that
nobody said had ended fade out by themselves, as fast as the others' gaps allow.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from itertools import pairwise

from ttlcache.estimators import SlidingMean, SurvivalCurve
from ttlcache.gaps import GapHistory
from ttlcache.types import GapKey
from ttlcache_lmcache.programs import ChainProgram

#: Everybody's worth while no gap has ended yet.
UNKNOWN = 0.5
#: A tool has a curve of its own above so many gaps; below it all tools share one.
_MIN_RECORDS = 20
#: Steps of a curve that are looked at; a finer one is thinned out.
_MAX_STEPS = 512
_WINDOW = 1000


class ReturnCurve:
    """E[exp(-(T - w) / horizon) | T > w] of one survival curve, for every w."""

    def __init__(self, curve: SurvivalCurve, horizon_s: float) -> None:
        stride = max(1, math.ceil(len(curve.times) / _MAX_STEPS))
        # From the end, so that the last step, what never returns, is always there.
        self._times = [float(t) for t in curve.times[::-1][::stride]][::-1]
        self._left = [float(s) for s in curve.survival[::-1][::stride]][::-1]
        self._horizon_s = horizon_s
        self._worth = self._backwards()

    def _backwards(self) -> list[float]:
        """The worth just after each step."""
        worth = [0.0] * len(self._times)
        steps = list(enumerate(pairwise(self._times)))
        for index, (at_s, next_s) in reversed(steps):
            worth[index] = self._until(
                index + 1, next_s - at_s, self._left[index], worth
            )
        return worth

    def _until(
        self, step: int, wait_s: float, left: float, worth: list[float]
    ) -> float:
        """The worth of waiting for `step` when a share of `left` has not returned."""
        if left <= 0.0:
            return 0.0
        stay = self._left[step] / left
        value = (1.0 - stay) + stay * worth[step]
        return value * math.exp(-wait_s / self._horizon_s)

    def after(self, waited_s: float) -> float:
        """The worth of a program that has been silent for `waited_s`."""
        step = bisect_right(self._times, waited_s)
        if step == len(self._times):
            return 0.0
        left = self._left[step - 1] if step else 1.0
        return self._until(step, self._times[step] - waited_s, left, self._worth)


class Returns:
    """The worth of programs. Not thread-safe."""

    def __init__(self, gaps: GapHistory) -> None:
        self._gaps = gaps
        self._gap_s = SlidingMean(_WINDOW)
        self._service_s = SlidingMean(_WINDOW)
        self._curves: dict[GapKey | None, ReturnCurve | None] = {}
        self._drawn_s = -math.inf

    def observe_gap(self, seconds: float) -> None:
        self._gap_s.observe(seconds)

    def observe_service(self, seconds: float) -> None:
        """So long a turn took, from its lookup to its end."""
        self._service_s.observe(seconds)

    def redraw(self, now_s: float) -> None:
        """Look at the gaps anew at the next question."""
        if now_s != self._drawn_s:
            self._curves.clear()
            self._drawn_s = now_s

    def worth(self, program: ChainProgram, now_s: float) -> float:
        """From 0, never wanted again, to 1, wanted now."""
        if program.running:
            took_s = now_s - program.seen_s
            left_s = max(self._service_s.value - took_s, 0.0)
            curve = self._curve(None)
            if curve is None:
                return UNKNOWN
            return curve.after(0.0) * math.exp(-left_s / self._horizon_s)
        curve = self._curve(self._gaps.best_key(program.gap_key, _MIN_RECORDS, True))
        return UNKNOWN if curve is None else curve.after(now_s - program.since_s)

    @property
    def _horizon_s(self) -> float:
        """One round of a typical program."""
        return max(self._gap_s.value + self._service_s.value, 1e-3)

    def _curve(self, key: GapKey | None) -> ReturnCurve | None:
        if key not in self._curves:
            curve = self._gaps.survival(key, self._drawn_s)
            known = len(curve.times) > 0
            self._curves[key] = ReturnCurve(curve, self._horizon_s) if known else None
        return self._curves[key]
