"""`python -m bench sim`, and its table of cells for the terminal."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from bench.sim import run
from bench.sim.options import SimOptions, cells_of
from bench.sim.settings import Cell
from bench.tables import table
from ttlcache_sim.load.workload import build
from ttlcache_sim.settings import CellResult

#: Columns of a terminal that shows all numbers in full.
MIN_WIDTH = 180
#: Column, metric, digits.
_COLUMNS = (
    ("mean JCT s", "mean_jct_s", 1),
    ("p95", "p95_jct_s", 1),
    ("p99", "p99_jct_s", 1),
    ("programs/s", "programs_per_s", 4),
    ("hit", "prompt_hit", 3),
    ("wait s", "mean_wait_s", 2),
    ("prefill s", "prefill_s", 0),
    ("reload s", "reload_s", 0),
    ("preempt", "preemptions", 0),
)


_ROLLOUT_COLUMNS = (
    ("turns/min", "turns_per_min", 1),
    ("batches/min", "rollout_steps_per_min", 3),
    ("t90 s", "time_to_90pct_s", 0),
)


def sim(options: SimOptions, console: Console) -> None:
    """vLLM's own scheduler in virtual time: every rival as an arm. No GPU, no model."""
    cells = cells_of(options)
    results = run.run_cells(
        cells,
        processes=options.processes,
        cache=run.CACHE if options.use_cache else None,
        console=console,
    )
    # Redirected output is 80 columns wide to rich: numbers would be cut.
    wide = Console(width=max(console.width, MIN_WIDTH), file=console.file)
    wide.print(arms_table(cells, results))
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(run.to_json(cells, results) + "\n")


def _columns(metrics: Mapping[str, object]) -> tuple[tuple[str, str, int], ...]:
    of_rollouts = _ROLLOUT_COLUMNS if "rollout_steps" in metrics else ()
    return (*_COLUMNS, *of_rollouts)


def arms_table(cells: Sequence[Cell], results: Sequence[CellResult]) -> Table:
    """One row an arm: means over its seeds; JCT relative to the first arm."""
    by_arm: dict[str, list[CellResult]] = {}
    for cell, result in zip(cells, results, strict=True):
        by_arm.setdefault(cell.name, []).append(result)
    caveat = build(cells[0].workload).caveat
    title = f"{cells[0].workload.name}, {len(results) // len(by_arm)} seed(s)"
    title += f" ({caveat})" if caveat else ""
    columns, rows = _columns(results[0].metrics), []
    first_s = _mean(next(iter(by_arm.values())), "mean_jct_s")
    for arm, own in by_arm.items():
        relative = _mean(own, "mean_jct_s") / first_s
        numbers = [f"{_mean(own, key):.{digits}f}" for _, key, digits in columns]
        cpu_s = statistics.fmean(result.wall["cpu_s"] for result in own)
        rows.append([arm, f"{relative:.3f}", *numbers, f"{cpu_s:.0f}"])
    names = ("arm", "x first", *(name for name, _, _ in columns), "CPU s")
    return table(title, names, rows, plain=True)


def _mean(results: Sequence[CellResult], key: str) -> float:
    return statistics.fmean(result.metrics[key] for result in results)
