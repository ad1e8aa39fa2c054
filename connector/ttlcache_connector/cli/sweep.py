"""Measuring prefill within a time budget, and the curve through it.

Every length is measured once, shortest first, then again until its two fastest
measurements agree: somebody else's load only ever slows one down, so that two that
agree at the bottom are the machine's own time. What agrees is not repeated.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ttlcache.estimators.costs import CostModel
from ttlcache.estimators.regression import non_negative_solution

FIRST_TOKENS = 1_000
#: The two fastest measurements of a length agree within this: enough of them.
MAX_SPREAD = 0.05
MAX_REPEATS = 6
#: Lengths between the fitted ones, as multiples of them: never fitted to.
CHECK_AT = 1.5
#: Seconds for one prompt of this many tokens -> seconds.
Measure = Callable[[int], float]


@dataclass(frozen=True, slots=True)
class Point:
    """One length: how often it was measured, the fastest, and what the curve says.

    spread: of the two fastest, relative; None after one measurement.
    """

    tokens: int
    times: int
    spread: float | None
    seconds: float
    predicted_s: float
    is_fitted: bool

    @property
    def error(self) -> float:
        return self.predicted_s / self.seconds - 1.0


@dataclass(frozen=True, slots=True)
class Curve:
    """The fit and how well it predicts; `skipped` lengths would have taken too long."""

    coefficients: tuple[float, float, float]
    points: list[Point]
    skipped: list[int]

    @property
    def median_error(self) -> float | None:
        """Median relative error on lengths that were not fitted to, if there are."""
        errors = [abs(point.error) for point in self.points if not point.is_fitted]
        return statistics.median(errors) if errors else None


def sweep(
    measure: Measure,
    longest: int,
    budget_s: float,
    now_s: Callable[[], float],
    told: Callable[[str, float], None] = lambda what, spent_s: None,
) -> Curve:
    """Measure within about `budget_s` seconds and fit.

    Prefill is at most quadratic, which bounds the next length's seconds: one that
    would not end in time is skipped, and so are those above it.
    """
    started_s = now_s()
    seen: dict[int, list[float]] = {}

    def left_s() -> float:
        return budget_s - (now_s() - started_s)

    def once(length: int) -> None:
        told(f"{length:,} tokens", now_s() - started_s)
        seen.setdefault(length, []).append(measure(length))

    measure(min(FIRST_TOKENS // 4, longest))  # compiles, warms up
    lengths = _lengths(longest)
    for length in lengths:
        # Those already measured want a second time each.
        second_s = sum(min(times) for times in seen.values())
        if seen and left_s() < second_s + _bound_s(seen, length):
            break
        once(length)
    _repeat(seen, once, left_s)
    return _curve(seen, lengths, longest)


def _bound_s(seen: dict[int, list[float]], length: int) -> float:
    before = max(seen)
    return min(seen[before]) * (length / before) ** 2


def _repeat(
    seen: dict[int, list[float]],
    once: Callable[[int], None],
    left_s: Callable[[], float],
) -> None:
    """Rounds over the lengths whose fastest measurements do not agree yet.

    In turns, so that a burst of load does not meet all measurements of one length.
    """
    for _ in range(MAX_REPEATS - 1):
        for length, times in seen.items():
            spread = _spread(times)
            is_open = spread is None or spread > MAX_SPREAD
            # The slowest so far is what it may take while others load the machine.
            if is_open and left_s() > max(times):
                once(length)


def _spread(times: Sequence[float]) -> float | None:
    if len(times) < 2:
        return None
    first, second = sorted(times)[:2]
    return second / first - 1.0


def _curve(seen: dict[int, list[float]], lengths: list[int], longest: int) -> Curve:
    best = {length: min(times) for length, times in seen.items()}
    between = _between(longest)
    fitted = [length for length in best if length not in between]
    coefficients = fit([(length, best[length]) for length in fitted])
    costs = CostModel({"prefill": list(coefficients)})
    points = [
        Point(
            tokens=length,
            times=len(seen[length]),
            spread=_spread(seen[length]),
            seconds=seconds,
            predicted_s=costs.prefill_s(length),
            is_fitted=length in fitted,
        )
        for length, seconds in sorted(best.items())
    ]
    return Curve(coefficients, points, [n for n in lengths if n not in seen])


def _lengths(longest: int) -> list[int]:
    """1000, 1500, 2000, 3000, 4000 … tokens; `longest` alone if it is shorter."""
    doubled = [min(FIRST_TOKENS, longest)]
    while doubled[-1] * 2 <= longest:
        doubled.append(doubled[-1] * 2)
    return sorted({*doubled, *_between(longest)})


def _between(longest: int) -> set[int]:
    """Lengths that check the fit."""
    found, length = set(), FIRST_TOKENS
    while int(length * CHECK_AT) <= longest:
        found.add(int(length * CHECK_AT))
        length *= 2
    return found


def fit(points: Sequence[tuple[int, float]]) -> tuple[float, float, float]:
    """Non-negative least squares of relative errors: (a, b, c) of P(n)."""
    tokens = np.array([n for n, _ in points], dtype=np.float64)
    seconds = np.array([s for _, s in points], dtype=np.float64)
    rows = np.stack([tokens, tokens**2, np.ones_like(tokens)]) / seconds
    gram, pull = rows @ rows.T, rows.sum(axis=1)
    a, b, c = non_negative_solution(gram.tolist(), pull.tolist())
    return a, b, c
