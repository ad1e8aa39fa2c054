"""`bench disk-tier`."""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

#: Throughput of the verified tier over the unverified one that is good enough.
BAR = 0.9


def disk_tier(
    object_kib: Annotated[
        int, typer.Option(help="Size of an object: one chunk's KV.", min=4)
    ] = 4096,
    objects: Annotated[int, typer.Option(help="Objects a round.", min=8)] = 64,
    rounds: Annotated[int, typer.Option(help="Paired rounds.", min=2)] = 15,
    folder: Annotated[
        Path | None, typer.Option(help="Where to write; the system's temporary folder.")
    ] = None,
) -> None:
    """serve-tiers's verified disk tier against LMCache's fs_native. Status 1: bar
    missed."""
    # Here: only this scope needs LMCache.
    from bench import disk_tier as bench

    shape = bench.Shape(objects, object_kib << 10)
    with tempfile.TemporaryDirectory(dir=folder) as place:
        running = bench.Bench(shape, Path(place))
        try:
            found = running.rounds(rounds)
        finally:
            running.close()
    table = Table("", *found, "verified / unverified")
    for measure in bench.MEASURES:
        rates = (statistics.median(by[measure]) / 1e9 for by in found.values())
        ratio = bench.ratio(found, measure)
        cells = (f"{rate:.2f} GB/s" for rate in rates)
        table.add_row(measure, *cells, f"{ratio} (standard error)")
    console = Console()
    console.print(table)
    means = [bench.ratio(found, name).geometric_mean for name in bench.MEASURES]
    console.print(f"bar: {BAR}x, lowest {min(means):.3f}x, {rounds} rounds")
    raise typer.Exit(0 if min(means) >= BAR else 1)
