"""What the grid has to show, computed from its rows."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.ratios import Ratio

#: Not a rival: it knows the future.
REFERENCE = "oracle"
OURS, BASE, PLAIN = "adaptive", "cachettl", "vllm"


@dataclass(frozen=True, slots=True)
class Bar:
    """reached: nan where the grid has not what it takes. where: the worst cell."""

    name: str
    limit: float
    reached: float
    where: str = ""

    @property
    def verdict(self) -> str:
        if math.isnan(self.reached):
            return "not measured"
        return "pass" if self.reached <= self.limit else "FAIL"


def bars(rows: Sequence[Mapping[str, Any]]) -> list[Bar]:
    """All bars of the grid; rows as in `bench.report.grid.to_rows`."""
    return [
        _geomean(rows),
        _worst(rows, f"worst cell {OURS} / best other arm", 1.03, best_rival),
        _worst(
            [row for row in rows if row["load"] == "half"],
            f"worst cell at half load {OURS} / {PLAIN}",
            1.01,
            lambda row: mean_of(row, PLAIN),
        ),
        _worst(
            rows,
            f"worst cell p99 {OURS} / {PLAIN}",
            1.0,
            lambda row: mean_of(row, PLAIN, "p99_jct_s"),
            "p99_jct_s",
        ),
        _regret(rows),
    ]


def label(row: Mapping[str, Any]) -> str:
    return f"{row['workload']} {row['pool']} {row['load']}"


def regret(row: Mapping[str, Any], arm: str) -> float:
    """Mean JCT over the oracle's, less one; nan where one of them is missing."""
    return mean_of(row, arm) / mean_of(row, REFERENCE) - 1.0


def mean_of(row: Mapping[str, Any], arm: str, key: str = "mean_jct_s") -> float:
    """Mean over the seeds."""
    own = row["arms"].get(arm)
    return statistics.fmean(own[key]) if own else math.nan


def over(
    rows: Sequence[Mapping[str, Any]], arm: str, base: str, load: str | None = None
) -> float:
    """Geometric mean over the cells, or those of a load, of mean JCT over `base`'s."""
    return statistics.geometric_mean(
        mean_of(row, arm) / mean_of(row, base)
        for row in rows
        if load in (None, row["load"])
    )


def ratio_of(row: Mapping[str, Any], arm: str, key: str = "mean_jct_s") -> Ratio:
    """Ours over that arm's, seed by seed."""
    pairs = zip(row["arms"][OURS][key], row["arms"][arm][key], strict=True)
    return Ratio(tuple(ours / theirs for ours, theirs in pairs))


def best_rival(row: Mapping[str, Any]) -> float:
    """JCT of the best other arm; variants of our own ("adaptive-…") are no rivals."""
    rivals = [
        mean_of(row, arm)
        for arm in row["arms"]
        if arm != REFERENCE and not arm.startswith(OURS)
    ]
    return min(rivals, default=math.nan)


def _geomean(rows: Sequence[Mapping[str, Any]]) -> Bar:
    name = f"geometric mean {OURS} / {BASE}"
    ratios = list(_known(mean_of(row, OURS) / mean_of(row, BASE) for row in rows))
    if not ratios:
        return Bar(name, 0.85, math.nan)
    return Bar(name, 0.85, statistics.geometric_mean(ratios), f"{len(ratios)} cells")


def _worst(
    rows: Sequence[Mapping[str, Any]],
    name: str,
    limit: float,
    against: Any,
    key: str = "mean_jct_s",
) -> Bar:
    worst, where = math.nan, ""
    for row in rows:
        ratio = mean_of(row, OURS, key) / against(row)
        if not math.isnan(ratio) and not ratio <= worst:
            worst, where = ratio, label(row)
    return Bar(name, limit, worst, where)


def _regret(rows: Sequence[Mapping[str, Any]]) -> Bar:
    name = f"mean regret {OURS} / {BASE}"
    ours = list(_known(regret(row, OURS) for row in rows))
    base = list(_known(regret(row, BASE) for row in rows))
    if not ours or not base or statistics.fmean(base) <= 0:
        return Bar(name, 0.5, math.nan)
    mine, theirs = statistics.fmean(ours), statistics.fmean(base)
    return Bar(name, 0.5, mine / theirs, f"{mine:.3f} / {theirs:.3f}")


def _known(values: Iterator[float]) -> Iterator[float]:
    return (value for value in values if not math.isnan(value))
