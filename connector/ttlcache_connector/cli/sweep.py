"""Measuring prefill within a time budget, and the curve through it.

Every length is measured in turns, so that a burst of load does not meet all
measurements of one, and its fastest counts: somebody else's load only ever slows one
down.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ttlcache.estimators.costs import CostModel
from ttlcache.estimators.regression import non_negative_solution

FIRST_TOKENS = 1_000
#: Measurements of each length.
ROUNDS = 3
#: Seconds for one prompt of this many tokens -> seconds.
Measure = Callable[[int], float]


@dataclass(frozen=True, slots=True)
class Point:
    """One length: the fastest measurement, and what the curve says."""

    tokens: int
    seconds: float
    predicted_s: float

    @property
    def error(self) -> float:
        return self.predicted_s / self.seconds - 1.0


@dataclass(frozen=True, slots=True)
class Curve:
    """The fit and how well it fits; `skipped` lengths would have taken too long."""

    coefficients: tuple[float, float, float]
    points: list[Point]
    skipped: list[int]


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
    measure(min(FIRST_TOKENS // 4, longest))  # compiles, warms up
    lengths = _lengths(longest)
    for _ in range(ROUNDS):
        bound_s = 0.0
        for length in lengths:
            # The slowest so far is what it may take while others load the machine.
            bound_s = max(seen.get(length, [bound_s]))
            spent_s = now_s() - started_s
            if seen and spent_s + bound_s > budget_s:
                break
            told(f"{length:,} tokens", spent_s)
            seen.setdefault(length, []).append(measure(length))
            bound_s = 4 * min(seen[length])  # of the next, which is twice as long
    return _curve({length: min(times) for length, times in seen.items()}, lengths)


def _lengths(longest: int) -> list[int]:
    """1000, 2000, 4000 … tokens; `longest` alone if it is shorter."""
    doubled = [min(FIRST_TOKENS, longest)]
    while doubled[-1] * 2 <= longest:
        doubled.append(doubled[-1] * 2)
    return doubled


def _curve(fastest_s: dict[int, float], lengths: list[int]) -> Curve:
    coefficients = fit(list(fastest_s.items()))
    costs = CostModel({"prefill": list(coefficients)})
    points = [
        Point(length, seconds, costs.prefill_s(length))
        for length, seconds in fastest_s.items()
    ]
    return Curve(coefficients, points, [n for n in lengths if n not in fastest_s])


def fit(points: Sequence[tuple[int, float]]) -> tuple[float, float, float]:
    """Non-negative least squares of relative errors: (a, b, c) of P(n)."""
    tokens = np.array([n for n, _ in points], dtype=np.float64)
    seconds = np.array([s for _, s in points], dtype=np.float64)
    rows = np.stack([tokens, tokens**2, np.ones_like(tokens)]) / seconds
    gram, pull = rows @ rows.T, rows.sum(axis=1)
    a, b, c = non_negative_solution(gram.tolist(), pull.tolist())
    return a, b, c
