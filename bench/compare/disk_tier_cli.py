"""`bench disk-tier`: its options, its table and its bar."""

from __future__ import annotations

import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.command import option

#: Throughput of the verified tier over the unverified one that is good enough.
BAR = 0.9


@dataclass(frozen=True, slots=True)
class DiskTierOptions:
    """What is stored and loaded, and where."""

    object_kib: int = option(4096, "Size of an object: one chunk's KV.", min=4)
    objects: int = option(64, "Objects a round.", min=8)
    rounds: int = option(15, "Paired rounds.", min=2)
    cold: bool = option(False, "Load from the device, too.", "--cold")
    folder: Path | None = option(None, "Where to write; the system's temporary folder.")


def disk_tier(options: DiskTierOptions, console: Console) -> int:
    """serve-tiers's verified disk tier against LMCache's fs_native. Status 1: bar
    missed."""
    # Here: only this scope needs LMCache.
    from bench.compare import disk_tier as bench

    shape = bench.Shape(options.objects, options.object_kib << 10)
    with tempfile.TemporaryDirectory(dir=options.folder) as place:
        running = bench.Bench(shape, Path(place), cold=options.cold)
        try:
            found = running.rounds(options.rounds)
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
        wall = bench.ratio(found, measure, "wall_s")
        cpu = bench.ratio(found, measure, "cpu_s")
        cells = (f"{rate / 1e9:.2f}" for rate in rates)
        table.add_row(measure, *cells, str(wall), str(cpu))
        means.append(wall.geometric_mean)
    console.print(table)
    console.print(
        f"bar: {BAR}x, lowest {min(means):.3f}x. {options.rounds} paired rounds, ± one "
        "standard error"
    )
    return 0 if min(means) >= BAR else 1
