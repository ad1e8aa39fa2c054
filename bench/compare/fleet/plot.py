"""Bars of the fleet demo: where prompt tokens came from, and how long jobs took."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt

from bench.compare.fleet.arms import FleetResult


def draw(results: Sequence[FleetResult], path: Path) -> Path:
    """Write the figure as a PNG; returns `path`."""
    names = [result.name for result in results]
    gpu = [100 * result.gpu_hit for result in results]
    below = [100 * result.reloaded for result in results]
    figure, (hits, times) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    hits.bar(names, gpu, color="#22577a", label="GPU memory")
    hits.bar(names, below, bottom=gpu, color="#80c490", label="shared LMCache")
    hits.set_ylabel("% of prompt tokens not prefilled")
    hits.set_ylim(0, 100)
    hits.legend(frameon=False, loc="upper left")
    times.bar(names, [r.summary.mean_jct_s for r in results], color="#c8332b")
    times.set_ylabel("mean job completion time, s")
    for axis in (hits, times):
        axis.tick_params(axis="x", rotation=20)
        axis.grid(axis="y", color="#eeeeee", linewidth=0.8)
        axis.set_axisbelow(True)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path
