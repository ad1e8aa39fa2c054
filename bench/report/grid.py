"""`python -m bench grid`: all arms on all cells, and the verdict."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
from bench.sim.settings import Cell, CellResult
from bench.tables import table

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


def grid(options: GridOptions, console: Console) -> None:
    """Every arm on every cell: workloads x loads x pools x seeds, and the verdict."""
    result = run_grid(options, console)
    print_grid(result, console)
    if (out := options.out) is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(to_json(options, result) + "\n")
        wall = json.dumps({"cpu_s": round(result.cpu_s)})
        out.with_suffix(".wall.json").write_text(wall + "\n")


def run_grid(options: GridOptions, console: Console) -> GridResult:
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

    def measure(cells: Sequence[Cell]) -> list[CellResult]:
        return run.run_cells(
            cells,
            processes=options.processes,
            cache=run.CACHE if options.use_cache else None,
            console=console,
        )

    probed = measure([cell for _, _, cell in asked])
    jct_s: dict[int, dict[int, float]] = defaultdict(dict)
    for (place, crowd, _), result in zip(asked, probed, strict=True):
        jct_s[id(place)][crowd] = result.metrics["mean_jct_s"]
    found = points(options, where, [saturation(jct_s[id(place)]) for place in where])
    cells = [cell for point in found for own in point.cells.values() for cell in own]
    results = measure(cells)
    rows = to_rows(found, dict(zip(map(id, cells), results, strict=True)))
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
        words.append(f"--seeds {','.join(map(str, options.seeds))}")
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
    columns = ("bar", "limit", "reached", "where", "verdict")
    rows = (
        (bar.name, f"{bar.limit:g}", f"{bar.reached:.3f}", bar.where, bar.verdict)
        for bar in bars
    )
    return table("bars", columns, rows, left=5, plain=True)


def seeds_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Of `adaptive` over each other arm: how much of it is chance."""
    ours, found = grid_bars.OURS, []
    for row in rows:
        for arm in (arm for arm in row["arms"] if arm != ours):
            ratio = grid_bars.ratio_of(row, arm)
            first = Ratio(ratio.by_round[:2]).geometric_mean
            p99 = grid_bars.ratio_of(row, arm, "p99_jct_s")
            where = grid_bars.label(row)
            found.append((where, arm, str(ratio), f"{first:.3f}", str(p99)))
    title = f"{ours} / arm over {_num_seeds(rows)} seeds"
    columns = ("cell", "arm", "mean JCT", "first two seeds", "p99")
    return table(title, columns, found, left=5, plain=True)


def loads_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """The same by load: geometric mean of the cells, and the worst of them."""
    ours = grid_bars.OURS
    loads = list(dict.fromkeys(str(row["load"]) for row in rows))

    def told(arm: str, key: str, load: str) -> str:
        cells = [
            grid_bars.ratio_of(row, arm, key).geometric_mean
            for row in rows
            if row["load"] == load
        ]
        return f"{statistics.geometric_mean(cells):.3f} ({max(cells):.3f})"

    found = (
        (arm, key, *(told(arm, key, load) for load in loads))
        for arm in rows[0]["arms"]
        if arm != ours
        for key in ("mean_jct_s", "p99_jct_s")
    )
    title = f"{ours} / arm, geometric mean of the cells (worst cell)"
    return table(title, ("arm", "metric", *loads), found, left=9, plain=True)


def _num_seeds(rows: Sequence[Mapping[str, Any]]) -> int:
    own = rows[0]["arms"].get(grid_bars.OURS)
    return len(own["mean_jct_s"]) if own else 0


def _cells_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    arms = list(rows[0]["arms"])
    found = []
    for row in rows:
        means = [statistics.fmean(row["arms"][arm]["mean_jct_s"]) for arm in arms]
        ratios = [f"{mean / means[0]:.3f}" for mean in means[1:]]
        found.append(
            [grid_bars.label(row), f"{row['rate']:g}", f"{means[0]:.0f}", *ratios]
        )
    columns = ("cell", "rate", f"{arms[0]} s", *arms[1:])
    return table(f"mean JCT / {arms[0]}'s", columns, found, plain=True)
