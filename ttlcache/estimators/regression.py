"""Small curves fitted online: non-negative, forgetting, hard to mislead.

Plain Python on purpose: with two or three coefficients, one numpy call costs more
than the whole update, and an update runs once per turn on the serving path.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import deque
from collections.abc import Sequence
from itertools import combinations

Row = Sequence[float]
Matrix = list[list[float]]

#: Keeps a singular system solvable; relative to a unit diagonal.
_RIDGE = 1e-9


class ReloadFit:
    """Seconds = latency + seconds a token * tokens, of one lower tier.

    Rows are divided by what the seed predicts for them, so that short and long
    contexts weigh alike. A residual beyond four times the median of the last 32 is
    clipped to that (Huber's idea): stalls do not bend the curve, while a lasting
    change is the median soon and gets through. The seed's *shape* stays as weak
    pseudo-observations, rescaled to the observed level, so that lengths never seen
    are extrapolated along it.

    Args:
        seed: both coefficients to start from, >= 0 and not both 0.
    """

    _FORGET = 0.998  # about the last 500 observations count
    _CLIP = 4.0
    _RESIDUALS = 32
    _RESIDUAL_FLOOR = 0.02
    _EARLY = 10  # observations before residuals mean anything
    _ANCHOR_TOKENS = (1_000.0, 16_000.0)
    _ANCHOR_WEIGHT = 0.1  # in observations
    _SOLVE_EVERY = 8  # once there are many, one more changes little

    def __init__(self, seed: Row) -> None:
        self._seed = tuple(seed)
        self._anchor_gram: Matrix = [[0.0] * 2 for _ in range(2)]
        self._anchor_pull = [0.0] * 2
        for tokens in self._ANCHOR_TOKENS:
            # Roots, because the Gram matrix squares its rows.
            root = math.sqrt(self._ANCHOR_WEIGHT)
            by = _seconds(self._seed, tokens) / root
            row = (1.0 / by, tokens / by)
            accumulate(self._anchor_gram, self._anchor_pull, row, root, keep=1.0)
        self._gram: Matrix = [[0.0] * 2 for _ in range(2)]
        self._pull = [0.0] * 2
        self._weight = 0.0
        self._level = 0.0  # weighted sum of y / seed
        self._early: list[float] = []  # the first multiples of the seed, ascending
        self._residuals: deque[float] = deque(maxlen=self._RESIDUALS)
        self._count = 0
        self._theta: Row = self._seed

    def predict(self, tokens: float) -> float:
        return _seconds(self._theta, tokens)

    def observe(self, tokens: float, seconds: float) -> None:
        """Learn from one measurement, both > 0; O(1)."""
        base, expected = _seconds(self._seed, tokens), self.predict(tokens)
        if not (base > 0.0 and expected > 0.0):
            return
        level = self._clipped(seconds, base, expected)
        keep = self._FORGET
        row = (1.0 / base, tokens / base)
        accumulate(self._gram, self._pull, row, level, keep)
        self._weight = keep * self._weight + 1.0
        self._level = keep * self._level + level
        self._count += 1
        if self._count <= 4 * self._SOLVE_EVERY or not self._count % self._SOLVE_EVERY:
            self._solve()

    def _clipped(self, seconds: float, base: float, expected: float) -> float:
        """As a multiple of the seed's prediction, outliers pulled in."""
        if self._count < self._EARLY:
            # The seed may be far off, so only the other measurements can tell.
            insort(self._early, seconds / base)
            usual = self._early[(len(self._early) - 1) // 2]
            return min(seconds / base, self._CLIP * usual)
        share = (seconds - expected) / expected
        limit = self._CLIP
        if len(self._residuals) >= self._EARLY:
            usual = sorted(self._residuals)[len(self._residuals) // 2]
            limit = self._CLIP * max(usual, self._RESIDUAL_FLOOR)
        self._residuals.append(abs(share))
        return expected * (1.0 + max(-limit, min(share, limit))) / base

    def _solve(self) -> None:
        level = self._level / self._weight
        gram, pull = [list(line) for line in self._gram], list(self._pull)
        for i in range(2):
            pull[i] += level * self._anchor_pull[i]
            for j in range(2):
                gram[i][j] += self._anchor_gram[i][j]
        self._theta = non_negative_solution(gram, pull)


def _seconds(theta: Row, tokens: float) -> float:
    return theta[0] + theta[1] * tokens


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
