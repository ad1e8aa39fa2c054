"""Job completion, first token, hits and held sessions by load, with and without."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import ScalarFormatter

from ttlcache_sim.estimate.verdict import Load, Outcome
from ttlcache_sim.metrics import HELD_TTFT_S

_ARMS: tuple[tuple[str, str, Callable[[Load], Outcome]], ...] = (
    ("vLLM", "#c8332b", lambda load: load.without),
    ("with ttlcache", "#22577a", lambda load: load.with_ttlcache),
)


def draw(loads: Sequence[Load], path: Path) -> None:
    """One picture of four, as PNG."""
    figure, axes = plt.subplots(2, 2, figsize=(9, 6), layout="constrained")
    _panel(axes[0, 0], loads, "mean job completion, s", lambda o: o.mean_jct_s)
    _panel(axes[0, 1], loads, "time to first token, p95, s", lambda o: o.p95_ttft_s)
    _panel(axes[1, 0], loads, "prompt tokens from the cache, %", lambda o: 100 * o.hit)
    held = f"sessions with first tokens in {HELD_TTFT_S:.0f} s, %"
    _panel(axes[1, 1], loads, held, lambda o: 100 * o.held)
    axes[0, 0].legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _panel(
    axis: Axes, loads: Sequence[Load], title: str, value: Callable[[Outcome], float]
) -> None:
    for name, colour, of in _ARMS:
        values = [value(of(load)) for load in loads]
        axis.plot([load.rate for load in loads], values, "o-", color=colour, label=name)
    axis.set(title=title, xlabel="programs a second", ylim=(0, None))
    axis.xaxis.set_major_formatter(ScalarFormatter(useMathText=False))
    axis.grid(alpha=0.3)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
