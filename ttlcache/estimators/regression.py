"""Least squares with coefficients of at least 0.

Plain Python on purpose: with two or three coefficients, one numpy call costs more
than the whole update, and an update runs once per turn on the serving path.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations

Row = Sequence[float]
Matrix = list[list[float]]

#: Keeps a singular system solvable; relative to a unit diagonal.
_RIDGE = 1e-9


def accumulate(
    gram: Matrix,
    pull: list[float],
    row: Row,
    weighted_y: float,
    keep: float,
    weight: float = 1.0,
) -> None:
    """gram = keep gram + weight row row', pull = keep pull + weight y row, in place."""
    for i, value in enumerate(row):
        pull[i] = keep * pull[i] + weighted_y * value
        line, value = gram[i], value * weight
        for j, other in enumerate(row):
            line[j] = keep * line[j] + value * other


def non_negative_solution(gram: Matrix, pull: Sequence[float]) -> tuple[float, ...]:
    """The exact minimum over theta >= 0: tries every support, largest first."""
    size = len(pull)
    # A unit diagonal: token counts and their squares differ by orders of magnitude.
    scale = [
        1.0 / math.sqrt(gram[i][i]) if gram[i][i] > 0 else 0.0 for i in range(size)
    ]
    scaled = [
        [gram[i][j] * scale[i] * scale[j] + _RIDGE * (i == j) for j in range(size)]
        for i in range(size)
    ]
    target = [pull[i] * scale[i] for i in range(size)]
    best, best_gain = [0.0] * size, 0.0
    for count in range(size, 0, -1):
        for support in combinations(range(size), count):
            part = _solution_on(scaled, target, support)
            gain = sum(v * target[i] for v, i in zip(part, support, strict=True))
            if min(part) < 0.0 or gain <= best_gain:
                continue
            best, best_gain = [0.0] * size, gain
            for value, i in zip(part, support, strict=True):
                best[i] = value
        if count == size and best_gain > 0.0:
            break  # unconstrained and feasible: nothing can be better
    return tuple(v * s for v, s in zip(best, scale, strict=True))


def _solution_on(
    gram: Matrix, pull: Sequence[float], support: Sequence[int]
) -> list[float]:
    """Gauss elimination of the positive definite system restricted to `support`."""
    rows = [[gram[i][j] for j in support] + [pull[i]] for i in support]
    size = len(rows)
    for k in range(size):
        for i in range(k + 1, size):
            factor = rows[i][k] / rows[k][k]
            for j in range(k, size + 1):
                rows[i][j] -= factor * rows[k][j]
    solution = [0.0] * size
    for i in range(size - 1, -1, -1):
        known = sum(rows[i][j] * solution[j] for j in range(i + 1, size))
        solution[i] = (rows[i][size] - known) / rows[i][i]
    return solution
