"""The command `python -m bench figures`: sweeps run again, pages rendered."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.command import one_of
from bench.report.figures.page import render
from bench.report.figures.servers import PREFIX
from bench.report.figures.summary import render_summary, write_into
from bench.report.figures.sweeps import SWEEPS, Sweep
from bench.sim import run
from ttlcache.cli.command import option

ROOT = Path(__file__).resolve().parents[3]
#: Everything that docs/benchmarks.md shows, committed.
RESULTS = ROOT / "bench" / "results"
_KEPT = (
    *("mean_jct_s", "p90_jct_s", "p95_jct_s", "p99_jct_s", "programs_per_s"),
    *("prompt_hit", "mean_wait_s", "num_turns", "num_programs"),
)
_DIGITS = 6


@dataclass(frozen=True, slots=True)
class FiguresOptions:
    """What to measure again before rendering, and where things are."""

    measure: str = option("", f"First run these again: all, or {','.join(SWEEPS)}.")
    results: Path = option(RESULTS, "Folder of the numbers.")
    docs: Path = option(ROOT / "docs", "Where benchmarks.md and bench/ go.")
    readme: Path = option(
        ROOT / "README.md", "Page whose results section is written anew."
    )
    processes: int = option(2, "Cells at a time.", min=1)

    def names(self) -> list[str]:
        """The sweeps to measure."""
        if self.measure == "all":
            return list(SWEEPS)
        names = [name.strip() for name in self.measure.split(",") if name.strip()]
        return [one_of("figure", name, SWEEPS) for name in names]


def figures(options: FiguresOptions, console: Console) -> None:
    """PNG, docs/benchmarks.md, README's results: from the numbers in bench/results."""
    for name in options.names():
        result = measure(SWEEPS[name], options.processes, console)
        console.print(f"wrote {save(name, result, options.results)}")
    found = load_results(options.results)
    if not found:
        raise ValueError(f"no results in {options.results}")
    from bench.report.figures.plots import draw  # only here matplotlib is needed

    for name, result in found.items():
        draw(name, result, options.docs / "bench")
    page = options.docs / "benchmarks.md"
    page.write_text(render(found))
    console.print(f"wrote {page}")
    write_into(options.readme, render_summary(found))
    console.print(f"wrote the results into {options.readme}")


def load_results(folder: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """All committed results, in the order of the page."""
    names = ["validate", *sorted(path.stem for path in folder.glob(f"{PREFIX}*.json"))]
    names += ["demo", "pin-vs-reload", "grid", "grid-untold", *SWEEPS, "overhead"]
    paths = {name: folder / f"{name}.json" for name in names}
    found = {n: json.loads(p.read_text()) for n, p in paths.items() if p.exists()}
    for name in found.keys() & SWEEPS.keys():
        # Words as they read today, not as they did when the numbers were measured.
        sweep = SWEEPS[name]
        words = {"title": sweep.title, "x": sweep.x, "drawn": sweep.drawn}
        found[name] |= words | {"roofline": sweep.roofline}
    return found


def measure(sweep: Sweep, processes: int, console: Console) -> dict[str, Any]:
    """Numbers of every cell of a sweep, in order of x and arm.

    Raises:
        RuntimeError: cells that failed.
    """
    rows = sweep.made() if sweep.made else _simulate(sweep, processes, console)
    return {
        "name": sweep.name,
        "programs": sweep.programs,
        "vllm": run.vllm_version(),
        "command": f"python -m bench figures --measure {sweep.name}",
        "rows": rows,
    }


def _simulate(sweep: Sweep, processes: int, console: Console) -> list[dict[str, Any]]:
    cells = sweep.cells()
    results = run.run_cells(
        [cell for _, cell in cells], processes=processes, console=console
    )
    kept = dict.fromkeys([*_KEPT, sweep.drawn[0], *sweep.kept])
    return [
        {
            "x": x,
            "arm": cell.name,
            "seed": cell.workload.seed,
            **{
                key: float(f"{result.metrics[key]:.{_DIGITS}g}")
                for key in kept
                if key in result.metrics
            },
        }
        for (x, cell), result in zip(cells, results, strict=True)
    ]


def save(name: str, value: dict[str, Any], folder: Path) -> Path:
    """One row a line, for readable diffs."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = ",\n".join(json.dumps(row, sort_keys=True) for row in value["rows"])
    rest = {key: entry for key, entry in value.items() if key != "rows"}
    head = json.dumps(rest, indent=1, sort_keys=True)
    path = folder / f"{name}.json"
    path.write_text(head[:-2] + ',\n "rows": [\n' + rows + "\n]}\n")
    return path
