"""Two arms on the same seeds: how much of a difference is chance."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ratio:
    """One arm's number over another's, by round or seed."""

    by_round: tuple[float, ...]

    @property
    def geometric_mean(self) -> float:
        return statistics.geometric_mean(self.by_round)

    @property
    def standard_error(self) -> float:
        """Of the mean logarithm, so a share of the ratio; nan for a single round."""
        if len(self.by_round) < 2:
            return math.nan
        logs = [math.log(value) for value in self.by_round]
        return statistics.stdev(logs) / math.sqrt(len(logs))

    def __str__(self) -> str:
        mean = self.geometric_mean
        return f"{mean:.3f} ± {mean * self.standard_error:.3f}"
