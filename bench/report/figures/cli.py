"""The command `python -m bench figures`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

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


def figures(
    measure: Annotated[
        str, typer.Option(help=f"First run these again: all, or {','.join(SWEEPS)}.")
    ] = "",
    results: Annotated[Path, typer.Option(help="Folder of the numbers.")] = RESULTS,
    docs: Annotated[Path, typer.Option(help="Where bench.md and bench/ go.")] = ROOT
    / "docs",
    readme: Annotated[
        Path, typer.Option(help="Page whose results section is written anew.")
    ] = ROOT / "README.md",
    processes: Annotated[int, typer.Option(help="Cells at a time.", min=1)] = 2,
) -> None:
    """PNG, CSV, docs/bench.md, README's results: from the numbers in bench/results."""
    console = Console()
    try:
        for name in _names(measure):
            # Here: rendering needs neither vLLM nor a process pool.
            from bench.report.figures import measure as runs

            result = runs.measure(SWEEPS[name], console, processes=processes)
            console.print(f"wrote {runs.save(name, result, results)}")
    except (ValueError, RuntimeError) as error:
        console.print(
            f"[red]error:[/] {escape(str(error))}", soft_wrap=True, highlight=False
        )
        raise typer.Exit(1) from None
    found = load_results(results)
    if not found:
        raise typer.BadParameter(f"no results in {results}")
    from bench.report.figures.plots import draw

    for name, result in found.items():
        draw(name, result, docs / "bench")
    (docs / "bench.md").write_text(render(found))
    console.print(f"wrote {docs / 'bench.md'}")
    write_into(readme, render_summary(found))
    console.print(f"wrote the results into {readme}")


def _names(text: str) -> list[str]:
    if text == "all":
        return list(SWEEPS)
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in SWEEPS:
            raise ValueError(f"figure {name!r}: expected {', '.join(SWEEPS)}")
    return names
