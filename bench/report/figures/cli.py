"""The command `python -m bench figures`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.command import one_of, option
from bench.report.figures.page import render
from bench.report.figures.summary import render_summary, write_into
from bench.report.figures.sweeps import SWEEPS

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "bench" / "results"


def load_results(folder: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """All committed results, in the order of the page."""
    names = ["grid", "grid-untold", *SWEEPS, "pin-vs-reload", "overhead"]
    paths = {name: folder / f"{name}.json" for name in names}
    found = {n: json.loads(p.read_text()) for n, p in paths.items() if p.exists()}
    for name in found.keys() & SWEEPS.keys():
        # As it reads today, not as it did when the numbers were measured.
        found[name]["note"] = SWEEPS[name].note
    return found


@dataclass(frozen=True, slots=True)
class FiguresOptions:
    """What to measure again before rendering, and where things are."""

    measure: str = option("", f"First run these again: all, or {','.join(SWEEPS)}.")
    results: Path = option(RESULTS, "Folder of the numbers.")
    docs: Path = option(ROOT / "docs", "Where bench.md and bench/ go.")
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
    """PNG, docs/bench.md, README's results: from the numbers in bench/results."""
    for name in options.names():
        # Here: rendering needs neither vLLM nor a process pool.
        from bench.report.figures import measure as runs

        result = runs.measure(SWEEPS[name], console, processes=options.processes)
        console.print(f"wrote {runs.save(name, result, options.results)}")
    found = load_results(options.results)
    if not found:
        raise ValueError(f"no results in {options.results}")
    from bench.report.figures.plots import draw

    for name, result in found.items():
        draw(name, result, options.docs / "bench")
    (options.docs / "bench.md").write_text(render(found))
    console.print(f"wrote {options.docs / 'bench.md'}")
    write_into(options.readme, render_summary(found))
    console.print(f"wrote the results into {options.readme}")
