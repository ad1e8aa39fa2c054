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
    cold: Annotated[
        bool, typer.Option("--cold", help="Load from the device, too.")
    ] = False,
    folder: Annotated[
        Path | None, typer.Option(help="Where to write; the system's temporary folder.")
    ] = None,
) -> None:
    """serve-tiers's verified disk tier against LMCache's fs_native. Status 1: bar
    missed."""
    # Here: only this scope needs LMCache.
    from bench.compare import disk_tier as bench

    shape = bench.Shape(objects, object_kib << 10)
    with tempfile.TemporaryDirectory(dir=folder) as place:
        running = bench.Bench(shape, Path(place), cold=cold)
        try:
            found = running.rounds(rounds)
        finally:
            running.close()
    columns = ("verified / unverified, GB/s", "GB a CPU second")
    table = Table("", *(f"{arm}, GB/s" for arm in found), *columns)
    means = []
    for measure in found[bench.VERIFIED]:
        rates = (
            statistics.median(shape.total_bytes / cost.wall_s for cost in by[measure])
            for by in found.values()
        )
        wall = bench.throughput(found, measure)
        cpu = bench.bytes_a_cpu_second(found, measure)
        cells = (f"{rate / 1e9:.2f}" for rate in rates)
        table.add_row(measure, *cells, str(wall), str(cpu))
        means.append(wall.geometric_mean)
    console = Console()
    console.print(table)
    console.print(
        f"bar: {BAR}x, lowest {min(means):.3f}x. {rounds} paired rounds, ± one "
        "standard error"
    )
    raise typer.Exit(0 if min(means) >= BAR else 1)
