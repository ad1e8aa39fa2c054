"""The results in README.md: what the grid says, in one small table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import grid_bars
from bench.figures.page import table

BEGIN = "<!-- results: written by `python -m bench figures` -->"
END = "<!-- end of results -->"
#: Within this share of the best other arm's JCT nobody is ahead.
_TIE = 1.01

Json = Mapping[str, Any]


def render_summary(grid: Json) -> str:
    """Geometric means of JCT over plain vLLM's, by arm and load; wins and losses."""
    rows = grid["rows"]
    loads = list(dict.fromkeys(row["load"] for row in rows))
    arms = [arm for arm in rows[0]["arms"] if arm != grid_bars.PLAIN]
    by_arm = {
        arm: [_share(rows, arm, load) for load in loads] + [_share(rows, arm)]
        for arm in arms
    }
    ordered = sorted(arms, key=lambda arm: by_arm[arm][-1])
    body = [[f"`{arm}`", *(f"{x:.2f}" for x in by_arm[arm])] for arm in ordered]
    header = ["mean JCT / plain vLLM's", *(f"{load} load" for load in loads), "all"]
    better, worse = _against_the_best(rows)
    return "\n".join(
        [
            "## Results",
            "",
            f"Geometric means over {len(rows)} cells (workload x pool x load; loads "
            "are multiples of plain vLLM's saturation), vLLM's own scheduler in "
            "virtual time, Llama-3.1-8B on an A100-80: "
            f"`{grid['setting']['command']}`. `oracle` knows the future.",
            "",
            table(header, body),
            "",
            f"Against the best other arm of each cell `{grid_bars.OURS}` is ahead by "
            f"more than 1 % in {better} and behind by more than 1 % in {worse}. "
            "[docs/bench.md](docs/bench.md) has every cell.",
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


def _share(rows: Sequence[Json], arm: str, load: str | None = None) -> float:
    return statistics.geometric_mean(
        grid_bars.mean_of(row, arm) / grid_bars.mean_of(row, grid_bars.PLAIN)
        for row in rows
        if load in (None, row["load"])
    )


def _against_the_best(rows: Sequence[Json]) -> tuple[int, int]:
    ratios = [
        grid_bars.mean_of(row, grid_bars.OURS) / grid_bars.best_rival(row)
        for row in rows
    ]
    better = sum(ratio < 1 / _TIE for ratio in ratios)
    worse = sum(ratio > _TIE for ratio in ratios)
    return better, worse
