"""The results in README.md: what the committed numbers say, in small tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.report import grid_bars
from bench.report.figures import tiers
from bench.report.figures.page import by_arm, losses
from bench.report.figures.text import table

BEGIN = "<!-- results: written by `python -m bench figures` -->"
END = "<!-- end of results -->"
#: Arms that README shows; docs/bench.md has all.
_SHOWN = (
    *("oracle", grid_bars.OURS, "infercept", "cachettl"),
    *("continuum-public", "thunderagent", "program-fcfs"),
)
#: Within this share of the best other arm's JCT nobody is ahead.
_TIE = 1.01

Json = Mapping[str, Any]


#: Sweeps over the load, and what their workloads are called here.
_LOADS = {"load-swe": "SWE-bench-like", "load-bfcl": "BFCL-like"}


def render_summary(results: Mapping[str, Json]) -> str:
    """The whole section; empty where nothing of it was measured."""
    parts = []
    if any(name in results for name in _LOADS):
        parts.append(_loads(results))
    if "grid" in results:
        parts.append(_grid(results["grid"]))
    if "pin-vs-reload" in results:
        parts.append(tiers.summary(results["pin-vs-reload"]))
    if not parts:
        return ""
    intro = (
        "## Results\n\n"
        "vLLM's own scheduler in virtual time, with a step-time model of Llama-3.1-8B "
        "on an A100-80; no GPU was used. `oracle` knows the future. "
        "[docs/bench.md](docs/bench.md) has the commands and every number."
    )
    return "\n\n".join([intro, *parts])


def _loads(results: Mapping[str, Json]) -> str:
    columns: dict[str, dict[str, float]] = {}
    behind: list[str] = []
    notes: list[str] = []
    for name, workload in _LOADS.items():
        if name not in results:
            continue
        means = by_arm(results[name], "mean_jct_s")
        for x, plain_s in means[grid_bars.PLAIN].items():
            columns[f"{workload}, {x}/s"] = {
                arm: own[x] / plain_s for arm, own in means.items()
            }
        notes.append(results[name].get("note", ""))
        behind += [f"{workload} at {text}" for text in losses(results[name])]
    # Two figures of different versions may have different arms.
    arms = dict.fromkeys(arm for own in columns.values() for arm in own)
    body = [
        [f"`{arm}`", *(_cell(own.get(arm)) for own in columns.values())]
        for arm in arms
        if arm in _SHOWN
    ]
    where = "; ".join(behind) or "nowhere"
    return (
        "Mean JCT over plain vLLM's, by programs a second:\n\n"
        + table(["arm", *columns], body)
        + f"\n\n`{grid_bars.OURS}` is behind another of these arms by more than 1 %: "
        + f"{where}. "
        + notes[0]
    ).rstrip()


def _cell(share: float | None) -> str:
    return "" if share is None else f"{share:.2f}"


def _grid(grid: Json) -> str:
    """Geometric means of JCT over plain vLLM's, by arm and load; wins and losses."""
    rows = grid["rows"]
    loads = list(dict.fromkeys(row["load"] for row in rows))
    arms = [arm for arm in rows[0]["arms"] if arm in _SHOWN]
    by_arm = {
        arm: [
            grid_bars.over(rows, arm, grid_bars.PLAIN, load) for load in (*loads, None)
        ]
        for arm in arms
    }
    ordered = sorted(arms, key=lambda arm: by_arm[arm][-1])
    body = [[f"`{arm}`", *(f"{x:.2f}" for x in by_arm[arm])] for arm in ordered]
    header = ["mean JCT / plain vLLM's", *(f"{load} load" for load in loads), "all"]
    better, worse = _against_the_best(rows)
    return "\n".join(
        [
            f"Geometric means over {len(rows)} cells (workload x pool x load; loads "
            "are multiples of plain vLLM's saturation): "
            f"`{grid['setting']['command']}`.",
            "",
            table(header, body),
            "",
            f"Against the best other arm of each cell `{grid_bars.OURS}` is ahead by "
            f"more than 1 % in {better} and behind by more than 1 % in {worse}.",
        ]
    )


def write_into(page: Path, text: str) -> None:
    """Replace what stands between the markers.

    Raises:
        ValueError: the page has no such place.
    """
    before, begin, rest = page.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{page}: expected {BEGIN!r} and {END!r}")
    page.write_text(f"{before}{begin}\n{text}\n{end}{after}")


def _against_the_best(rows: Sequence[Json]) -> tuple[int, int]:
    ratios = [
        grid_bars.mean_of(row, grid_bars.OURS) / grid_bars.best_rival(row)
        for row in rows
    ]
    better = sum(ratio < 1 / _TIE for ratio in ratios)
    worse = sum(ratio > _TIE for ratio in ratios)
    return better, worse
