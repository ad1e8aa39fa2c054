"""Ratios of arms over rounds, and over cells that hang together."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ttlcache_sim.bootstrap import Interval


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


def geometric_mean(intervals: Sequence[Interval]) -> Interval:
    """Of ratios that may hang together, as loads of one workload do; nan of none.

    So their errors are added up, and do not cancel each other.
    """
    if not intervals:
        return Interval(math.nan, math.nan, math.nan)
    mean = statistics.geometric_mean(each.ratio for each in intervals)
    widths = [math.log(each.high / each.low) / 2.0 for each in intervals]
    factor = math.exp(statistics.fmean(widths))
    return Interval(mean, mean / factor, mean * factor)
