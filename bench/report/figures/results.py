"""What the committed results hold: means, gains and losses, Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.report.grid_verdict import OURS, PLAIN, REFERENCE, TIE

Json = Mapping[str, Any]
#: By name: "grid", "validate", "demo", "overhead", "harness-…", or a sweep's.
Results = Mapping[str, Json]
_MORE_IS_BETTER = ("programs_per_s", "turns_per_min")


def table(
    header: Sequence[str], rows: Iterable[Sequence[str]], align: str = "--:"
) -> str:
    """Markdown; the first column is text, as the others are with align "---"."""
    marks = ["---", *(align for _ in header[1:])]
    return "\n".join("| " + " | ".join(row) + " |" for row in [header, marks, *rows])


def by_arm(result: Json, key: str) -> dict[str, dict[str, float]]:
    """Mean over the seeds, by arm and x, both in the order of the rows."""
    seen: dict[str, dict[str, list[float]]] = {}
    for row in result["rows"]:
        if key in row:
            seen.setdefault(row["arm"], {}).setdefault(row["x"], []).append(row[key])
    return {
        arm: {x: statistics.fmean(values) for x, values in own.items()}
        for arm, own in seen.items()
    }


def gains(
    result: Json, arm: str, base: str = PLAIN, key: str = "mean_jct_s"
) -> dict[str, float]:
    """By x, where both were measured: how many times better than the base it is."""
    means = by_arm(result, key)
    theirs = means.get(base, {})
    better = {x: theirs[x] / n for x, n in means.get(arm, {}).items() if x in theirs}
    if key in _MORE_IS_BETTER:
        return {x: 1.0 / gain for x, gain in better.items()}
    return better


def span(ratios: Iterable[float]) -> str:
    """The smallest and the largest one."""
    found = sorted(ratios)
    return " to ".join(dict.fromkeys(f"{end:.2f}x" for end in (found[0], found[-1])))


@dataclass(frozen=True, slots=True)
class Loss:
    """A point of a figure with another arm ahead of `adaptive`. share: of its JCT."""

    x: str
    rival: str
    share: float

    def __str__(self) -> str:
        return f"{self.x}: `{self.rival}` by {100 * self.share:.1f} %"


def losses(result: Json) -> list[Loss]:
    """Where `adaptive` is behind another arm that knows no future, by over 1 %."""
    means = by_arm(result, "mean_jct_s")
    found = []
    for x, mine in means.get(OURS, {}).items():
        rivals = {
            arm: own[x]
            for arm, own in means.items()
            if arm.partition(":")[0] not in (OURS, REFERENCE) and x in own
        }
        best = min(rivals, key=lambda arm: rivals[arm], default="")
        if best and mine > TIE * rivals[best]:
            found.append(Loss(x, best, mine / rivals[best] - 1))
    return found
