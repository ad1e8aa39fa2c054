"""Run a sweep and keep its numbers as small JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.report.figures.sweeps import Sweep
from bench.sim import run

#: Everything that docs/bench.md shows, committed.
RESULTS = Path(__file__).resolve().parents[2] / "results"
_KEPT = (
    "mean_jct_s",
    "p90_jct_s",
    "p95_jct_s",
    "p99_jct_s",
    "programs_per_s",
    "prompt_hit",
)
_DIGITS = 6


def measure(
    sweep: Sweep,
    console: Console,
    *,
    processes: int = 2,
    cache: Path | None = run.CACHE,
) -> dict[str, Any]:
    """Numbers of every cell of a sweep, in order of x and arm.

    Raises:
        RuntimeError: cells that failed.
    """
    cells = sweep.cells()
    results = run.run_cells(
        [cell for _, cell in cells], processes=processes, cache=cache, console=console
    )
    rows = [
        {
            "x": x,
            "arm": cell.name,
            "seed": cell.workload.seed,
            **{
                key: float(f"{result.metrics[key]:.{_DIGITS}g}")
                for key in dict.fromkeys([*_KEPT, *(key for key, *_ in sweep.tables)])
                if key in result.metrics
            },
        }
        for (x, cell), result in zip(cells, results, strict=True)
    ]
    return {
        "name": sweep.name,
        "title": sweep.title,
        "source": sweep.source,
        "x": sweep.x,
        "note": sweep.note,
        "programs": sweep.programs,
        "tables": sweep.tables,
        "vllm": run.vllm_version(),
        "command": f"python -m bench figures --measure {sweep.name}",
        "rows": rows,
    }


def save(name: str, value: dict[str, Any], folder: Path = RESULTS) -> Path:
    """One row a line, for readable diffs."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = ",\n".join(json.dumps(row, sort_keys=True) for row in value["rows"])
    rest = {key: entry for key, entry in value.items() if key != "rows"}
    head = json.dumps(rest, indent=1, sort_keys=True)
    path = folder / f"{name}.json"
    path.write_text(head[:-2] + ',\n "rows": [\n' + rows + "\n]}\n")
    return path
