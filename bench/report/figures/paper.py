"""The paper's figures and tables (`paper.toml`) beside ours: one row each.

"Agrees" is said of `cachettl`, our version of the paper's rule.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.report.figures.results import Json, Results, by_arm, gains, span, table
from bench.report.grid_verdict import OURS, PLAIN

PAPER = "cachettl"
#: What changes by less is called stable, or alike.
STABLE = 1.25
_METRICS = {
    "mean_jct_s": "mean",
    "p90_jct_s": "P90",
    "p95_jct_s": "P95",
    "programs_per_s": "throughput",
}


@dataclass(frozen=True, slots=True)
class Found:
    """ours: what our results say. agrees: with the paper; None: it has no number."""

    ours: str
    agrees: bool | None
    because: str


def section(results: Results) -> str:
    """A row for each figure, whether we have it or not."""
    figures = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())["figure"]
    header = ["figure", "the paper", "ours", "agreement"]
    return table(header, [_row(each, results) for each in figures], align="---")


def _row(figure: Mapping[str, Any], results: Results) -> list[str]:
    name, claim, needs = figure["name"], figure["claim"], figure.get("results", [])
    there = [need for need in needs if need in results]
    lacking = ",".join(need for need in needs if need not in results)
    lacks = f"`--measure {lacking}` was not run"
    if not there:
        why = figure.get("missing", lacks)
        return [f"{name}, {figure['section']}", claim, "not measured here", f"{why}."]
    found = CHECKS[figure["check"]](figure, [results[need] for need in there])
    word = {True: "Agrees", False: "Differs", None: "No number"}[found.agrees]
    links = [
        f"[{text}](bench/{need}.png)"
        for text, need in zip([name, *map(str, range(2, 9))], there, strict=False)
    ]
    linked = f"{' '.join(links)}, {figure['section']}"
    rest = f"; {lacks}" if lacking else ""
    return [linked, claim, found.ours, f"{word}: {found.because}{rest}."]


def _falls(figure: Json, results: Sequence[Json]) -> Found:
    """Whether each line falls from its first point to its last."""
    (result,) = results
    lines = by_arm(result, figure["metric"])
    falls = all(
        list(own.values()) == sorted(own.values(), reverse=True)
        for own in lines.values()
    )
    parts = []
    for arm, own in lines.items():
        (first, *_, last) = own
        pair = (own[first], own[last])
        ends = (f"{n:,.0f}" if n >= 100 else f"{n:.2f}" for n in pair)
        parts.append(f"`{arm}` {' to '.join(ends)}")
    ours = f"{', '.join(parts)} ({first} to {last} {result['x']})"
    return Found(ours, falls, "all fall" if falls else "not at every point")


def _queues_alike(figure: Json, results: Sequence[Json]) -> Found:
    """Seconds that a program waits in the queue, at the last point."""
    (result,) = results
    x = result["rows"][-1]["x"]
    waits_s = {
        row["arm"]: row["mean_wait_s"] * row["num_turns"] / row["num_programs"]
        for row in result["rows"]
        if row["x"] == x
    }
    share = waits_s["infercept"] / waits_s[PLAIN]
    shown = (PLAIN, "infercept", PAPER, OURS)
    ours = ", ".join(f"`{arm}` {waits_s[arm]:,.0f}" for arm in shown)
    because = f"`infercept` queues {share:.0%} of vLLM's"
    return Found(f"s a program at {x}: {ours}", share > 1 / STABLE, because)


def _ahead(figure: Json, results: Sequence[Json]) -> Found:
    """Over vLLM, and whether the paper's rule is ahead of all its rivals."""

    def over(arm: str, base: str, metric: str) -> Iterator[tuple[float, str, str]]:
        for result in results:
            for x, gain in gains(result, arm, base, metric).items():
                yield gain, base, x

    metrics, rivals = figure["metrics"], figure["rivals"]
    ours = "; ".join(
        f"{_METRICS[metric]} "
        + ", ".join(
            f"`{arm}` {span(gain for gain, *_ in over(arm, PLAIN, metric))}"
            for arm in (PAPER, OURS)
        )
        for metric in metrics
    )
    pairs = [
        p for metric in metrics for base in rivals for p in over(PAPER, base, metric)
    ]
    worst, base, x = min(pairs)
    behind = sum(gain < 0.99 for gain, *_ in pairs)
    if not behind:
        return Found(ours, True, "nowhere behind")
    because = f"behind in {behind} of {len(pairs)}, most {worst:.2f}x `{base}` at {x}"
    return Found(ours, False, because)


def _stable(figure: Json, results: Sequence[Json]) -> Found:
    """Over vLLM, whatever the engine's setting."""
    parts, changes = [], []
    for result in results:
        found = {arm: gains(result, arm).values() for arm in (PAPER, OURS)}
        shown = ", ".join(f"`{arm}` {span(own)}" for arm, own in found.items())
        parts.append(f"{result['x']}: {shown}")
        changes.append(max(found[PAPER]) / min(found[PAPER]))
    agrees = max(changes) < STABLE
    return Found("; ".join(parts), agrees, f"by {max(changes):.2f}x at most")


def _only_plain_slows_down(figure: Json, results: Sequence[Json]) -> Found:
    """Mean JCT at the last point over that at the first."""
    grown = {}
    for arm, own in by_arm(results[0], "mean_jct_s").items():
        first, *_, last = own.values()
        grown[arm] = last / first
    ours = ", ".join(f"`{arm}` {grown[arm]:.2f}x" for arm in (PLAIN, PAPER, OURS))
    agrees = grown[PAPER] < STABLE < grown[PLAIN]
    because = "as there" if agrees else f"`{PAPER}` grows {grown[PAPER]:.2f}x"
    return Found(f"JCT grows: {ours}", agrees, because)


def _in_order(figure: Json, results: Sequence[Json]) -> Found:
    """Over vLLM, and whether each arm is ahead of the one before it in the paper."""
    (result,), (base, *arms) = results, figure["order"]
    found = {arm: gains(result, arm, base, figure["metric"]) for arm in (*arms, OURS)}
    ours, agrees = [], True
    for x in found[OURS]:
        steps = [1.0, *(found[arm][x] for arm in arms)]
        agrees &= steps == sorted(steps)
        shown = ", ".join(f"`{arm}` {own[x]:.2f}x" for arm, own in found.items())
        ours.append(f"{shown} ({x})" if len(found[OURS]) > 1 else shown)
    return Found("; ".join(ours), agrees, "same order" if agrees else "another order")


def _overhead(figure: Json, results: Sequence[Json]) -> Found:
    rows = results[0]["rows"]
    ours = ", ".join(
        f"{r['load']} {r['plain_ms']:.2f} to {r['ours_ms']:.2f}" for r in rows
    )
    worst = max(rows, key=lambda row: row["ratio"])
    because = f"{worst['load']} {worst['ratio']:.2f}x"
    return Found(f"ms a step: {ours}", worst["ratio"] < 1.05, because)


CHECKS: Mapping[str, Callable[[Json, Sequence[Json]], Found]] = {
    "falls": _falls,
    "queues_alike": _queues_alike,
    "ahead": _ahead,
    "stable": _stable,
    "only_plain_slows_down": _only_plain_slows_down,
    "in_order": _in_order,
    "overhead": _overhead,
}
