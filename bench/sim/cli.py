"""`python -m bench sim`."""

from __future__ import annotations

from rich.console import Console

from bench.sim import report, run
from bench.sim.options import SimOptions, cells_of


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
    wide = Console(width=max(console.width, report.MIN_WIDTH), file=console.file)
    wide.print(report.arms_table(cells, results))
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(run.to_json(cells, results) + "\n")
