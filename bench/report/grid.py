"""`python -m bench grid`: all arms on all cells, and the verdict."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from bench.ratios import Ratio
from bench.report import grid_bars
from bench.report.grid_spec import (
    GridOptions,
    Point,
    places,
    points,
    probes,
    saturation,
)
from bench.sim import run
from bench.sim.settings import CellResult

#: What is kept of a cell, per seed.
METRICS = (
    "mean_jct_s",
    "p90_jct_s",
    "p95_jct_s",
    "p99_jct_s",
    "p99_turn_s",
    "programs_per_s",
    "prompt_hit",
    "mean_wait_s",
)
_DIGITS = 7
#: Of fewer seeds a standard error says nothing.
MIN_SEEDS = 4


@dataclass(frozen=True, slots=True)
class GridResult:
    """rows: one a cell. cpu_s: of all cells, cached ones included."""

    rows: list[dict[str, Any]]
    bars: list[grid_bars.Bar]
    cpu_s: float


def run_grid(
    options: GridOptions,
    console: Console,
    *,
    processes: int = 2,
    cache: Path | None = run.CACHE,
) -> GridResult:
    """Measure the saturation of every place, then run every cell.

    Each cell is cached when it is done: a grid that was interrupted goes on where it
    was.

    Raises:
        ValueError, RuntimeError: bad options; cells that failed, after all others.
    """
    where = places(options)
    asked = [
        (place, crowd, cell) for place in where for crowd, cell in probes(place).items()
    ]
    probed = run.run_cells(
        [cell for _, _, cell in asked],
        processes=processes,
        cache=cache,
        console=console,
    )
    jct_s: dict[int, dict[int, float]] = defaultdict(dict)
    for (place, crowd, _), result in zip(asked, probed, strict=True):
        jct_s[id(place)][crowd] = result.metrics["mean_jct_s"]
    grid = points(options, where, [saturation(jct_s[id(place)]) for place in where])
    cells = [cell for point in grid for own in point.cells.values() for cell in own]
    results = run.run_cells(cells, processes=processes, cache=cache, console=console)
    rows = to_rows(grid, dict(zip(map(id, cells), results, strict=True)))
    cpu_s = sum(result.wall["cpu_s"] for result in [*probed, *results])
    return GridResult(rows, grid_bars.bars(rows), cpu_s)


def to_rows(
    grid: Sequence[Point], results: Mapping[int, CellResult]
) -> list[dict[str, Any]]:
    """One row a cell of the grid: its setting, and per arm the metrics by seed."""
    return [
        {
            "workload": point.workload,
            "pool": point.pool,
            "load": point.load,
            "rate": point.rate,
            "blocks": point.engine.blocks,
            "offload": point.engine.offload,
            "arms": {
                arm: _metrics([results[id(cell)] for cell in own])
                for arm, own in point.cells.items()
            },
        }
        for point in grid
    ]


def _metrics(results: Sequence[CellResult]) -> dict[str, list[float]]:
    return {
        key: [float(f"{result.metrics[key]:.{_DIGITS}g}") for result in results]
        for key in METRICS
    }


def to_json(options: GridOptions, result: GridResult) -> str:
    """No times of this machine: same arguments and code, same bytes."""
    setting = {
        "half": options.half,
        "seeds": options.seed_list(),
        "programs": options.programs,
        "tell_last": options.tell_last,
        "vllm": run.vllm_version(),
        "command": command(options),
    }
    bars = [
        {
            "name": bar.name,
            "limit": bar.limit,
            "reached": None if bar.verdict == "not measured" else round(bar.reached, 4),
            "where": bar.where,
            "verdict": bar.verdict,
        }
        for bar in result.bars
    ]
    rows = ",\n".join(map(json.dumps, result.rows))
    head = json.dumps({"setting": setting, "bars": bars}, indent=1, sort_keys=True)
    return head[:-2] + ',\n "rows": [\n' + rows + "\n]}"


def command(options: GridOptions) -> str:
    """What gives these numbers again, but for the folder of the traces."""
    given = GridOptions()
    words = ["python -m bench grid --traces DIR"]
    for name in ("workloads", "pools", "loads"):
        value = tuple(getattr(options, name))
        if value != tuple(getattr(given, name)):
            words.append(f"--{name} {','.join(value)}")
    if options.arms != given.arms:
        words.append(f"--arms '{options.arms}'")
    words.append(f"--half {options.half}")
    if options.seeds:
        words.append(f"--seeds {options.seeds}")
    if options.programs != given.programs:
        words.append(f"--programs {options.programs:g}")
    if not options.tell_last:
        words.append("--no-tell-last")
    return " ".join(words)


def print_grid(result: GridResult, console: Console) -> None:
    """A table of the cells, relative to plain vLLM, and one of the bars."""
    wide = Console(width=max(console.width, 200), file=console.file)
    wide.print(_cells_table(result.rows))
    wide.print(bars_table(result.bars))
    if _num_seeds(result.rows) >= MIN_SEEDS:
        wide.print(seeds_table(result.rows))
        wide.print(loads_table(result.rows))
    wide.print(
        f"CPU time of all cells: {result.cpu_s / 3600:.2f} h (bar: 6 h, 3 h on 2 cores)"
    )


def bars_table(bars: Sequence[grid_bars.Bar]) -> Table:
    view = Table(title="bars", box=box.SIMPLE)
    for name in ("bar", "limit", "reached", "where", "verdict"):
        view.add_column(name)
    for bar in bars:
        view.add_row(
            bar.name, f"{bar.limit:g}", f"{bar.reached:.3f}", bar.where, bar.verdict
        )
    return view


def seeds_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Of `adaptive` over each other arm: how much of it is chance."""
    ours = grid_bars.OURS
    view = Table(title=f"{ours} / arm over {_num_seeds(rows)} seeds", box=box.SIMPLE)
    for name in ("cell", "arm", "mean JCT", "first two seeds", "p99"):
        view.add_column(name)
    for row in rows:
        for arm in row["arms"]:
            if arm == ours:
                continue
            ratio = grid_bars.ratio_of(row, arm)
            view.add_row(
                grid_bars.label(row),
                arm,
                str(ratio),
                f"{Ratio(ratio.by_round[:2]).geometric_mean:.3f}",
                str(grid_bars.ratio_of(row, arm, "p99_jct_s")),
            )
    return view


def loads_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """The same by load: geometric mean of the cells, and the worst of them."""
    ours = grid_bars.OURS
    loads = list(dict.fromkeys(str(row["load"]) for row in rows))
    view = Table(
        title=f"{ours} / arm, geometric mean of the cells (worst cell)", box=box.SIMPLE
    )
    for name in ("arm", "metric", *loads):
        view.add_column(name)
    for arm in (arm for arm in rows[0]["arms"] if arm != ours):
        for key in ("mean_jct_s", "p99_jct_s"):
            found = []
            for load in loads:
                cells = [
                    grid_bars.ratio_of(row, arm, key).geometric_mean
                    for row in rows
                    if row["load"] == load
                ]
                mean = statistics.geometric_mean(cells)
                found.append(f"{mean:.3f} ({max(cells):.3f})")
            view.add_row(arm, key, *found)
    return view


def _num_seeds(rows: Sequence[Mapping[str, Any]]) -> int:
    own = rows[0]["arms"].get(grid_bars.OURS)
    return len(own["mean_jct_s"]) if own else 0


def _cells_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    arms = list(rows[0]["arms"])
    view = Table(title=f"mean JCT / {arms[0]}'s", box=box.SIMPLE)
    for name in ("cell", "rate", f"{arms[0]} s", *arms[1:]):
        view.add_column(name, justify="left" if name == "cell" else "right")
    for row in rows:
        means = [statistics.fmean(row["arms"][arm]["mean_jct_s"]) for arm in arms]
        ratios = [f"{mean / means[0]:.3f}" for mean in means[1:]]
        view.add_row(
            grid_bars.label(row), f"{row['rate']:g}", f"{means[0]:.0f}", *ratios
        )
    return view
