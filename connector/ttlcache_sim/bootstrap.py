"""Two arms on the same seeds: how much of a difference is chance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

#: Consecutive programs wait in the same queue: they are drawn together.
BLOCK_PROGRAMS = 25
#: Of fewer blocks than this nothing is said.
MIN_BLOCKS = 6
RESAMPLES = 2000
_Z = NormalDist().inv_cdf(0.975)


@dataclass(frozen=True, slots=True)
class Interval:
    """A ratio and the ends of its 95 % interval; these are nan where it is unknown."""

    ratio: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        """As a share of the ratio."""
        return (self.high - self.low) / (2.0 * self.ratio)

    def __str__(self) -> str:
        return f"{self.ratio:.3f} ({self.low:.3f}-{self.high:.3f})"


def paired_bootstrap(
    ours: Sequence[Sequence[float]],
    base: Sequence[Sequence[float]],
    block_programs: int = BLOCK_PROGRAMS,
) -> Interval:
    """Sum of ours over that of base, the same programs on both sides.

    Drawn are blocks of consecutive programs, of all seeds together. The percentiles are
    as much wider as Student's t is for so few blocks. What another seed's arrivals
    would change is in it as far as the given seeds differ.

    Args:
        ours, base: by seed, then by program.
    """
    sums = np.array(
        [
            [math.fsum(side[at : at + block_programs]) for side in pair]
            for pair in zip(ours, base, strict=True)
            for at in range(0, len(pair[0]), block_programs)
        ]
    )
    num, total = len(sums), sums.sum(axis=0)
    if num < MIN_BLOCKS:
        return Interval(float(total[0] / total[1]), math.nan, math.nan)
    chosen = np.random.default_rng(0).integers(num, size=(RESAMPLES, num))
    drawn = sums[chosen].sum(axis=1)
    wide = math.sqrt(num / (num - 1)) * _t(num - 1)
    tail = NormalDist().cdf(-wide)
    low, high = np.quantile(drawn[:, 0] / drawn[:, 1], (tail, 1.0 - tail))
    return Interval(float(total[0] / total[1]), float(low), float(high))


def _t(freedom: int) -> float:
    """97.5th percentile of Student's t, by its expansion in 1 / freedom."""
    first = (_Z**3 + _Z) / 4.0
    second = (5.0 * _Z**5 + 16.0 * _Z**3 + 3.0 * _Z) / 96.0
    third = (3 * _Z**7 + 19 * _Z**5 + 17 * _Z**3 - 15 * _Z) / 384.0
    return _Z + first / freedom + second / freedom**2 + third / freedom**3
