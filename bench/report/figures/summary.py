"""The results in README.md: what the committed numbers say, in small tables."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.report import grid_verdict
from bench.report.figures import tiers
from bench.report.figures.page import by_arm, losses
from bench.report.figures.text import table

BEGIN = "<!-- results: written by `python -m bench figures` -->"
END = "<!-- end of results -->"
#: Arms that README shows; docs/bench.md has all.
_SHOWN = (
    *("oracle", grid_verdict.OURS, "infercept", "cachettl"),
    *("continuum-public", "thunderagent", "program-fcfs"),
)

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
        for x, plain_s in means[grid_verdict.PLAIN].items():
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
        + "\n\n`adaptive` is behind another of these arms by more than 1 %: "
        + f"{where}. "
        + notes[0]
    ).rstrip()


def _cell(share: float | None) -> str:
    return "" if share is None else f"{share:.2f}"


def _grid(grid: Json) -> str:
    """The verdict, and JCT over the base's by arm and load."""
    header, body = grid_verdict.arms(grid["rows"])
    upto = header.index("p50")
    return "\n".join(
        [
            f"{len(grid['rows'])} cells (workload x pool x share of the measured "
            "capacity), mean JCT over that of the best of three readings of CacheTTL "
            f"in each, 95 % intervals: `{grid['setting']['command']}`.",
            "",
            table(*grid_verdict.verdict(grid["rows"])),
            "",
            table(header[:upto], [row[:upto] for row in body]),
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
