"""One PNG a figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

from bench.report.figures.harnesses import PREFIX
from bench.report.figures.page import by_arm, programs_of, tables_of
from bench.report.figures.tiers import WAYS

_SIZE = (7.5, 4.0)
_DPI = 110
#: Sweeps whose x is no axis.
_BARS = ("ablation", "fleet-full", "rollout")


def draw(name: str, result: Mapping[str, Any], folder: Path) -> None:
    """`name`.png; grids and harnesses have tables alone."""
    folder.mkdir(parents=True, exist_ok=True)
    if name.startswith(("grid", PREFIX)):
        return
    elif name == "overhead":
        _draw_overhead(result, folder)
    elif name == "pin-vs-reload":
        _draw_pin_vs_reload(result, folder)
    else:
        _draw_sweep(name, result, folder)


def _draw_sweep(name: str, result: Mapping[str, Any], folder: Path) -> None:
    figure, axes = plt.subplots(figsize=_SIZE)
    xs = list(dict.fromkeys(row["x"] for row in result["rows"]))
    (key, title, _), *_ = tables_of(result)
    means = by_arm(result, key)
    if name in _BARS:
        _bars(axes, means, xs)
    else:
        for arm, own in means.items():
            points = [xs.index(x) for x in own]
            axes.plot(points, list(own.values()), marker="o", label=arm)
        axes.set_xticks(range(len(xs)), xs)
    axes.set_xlabel(result["x"])
    axes.set_ylabel(title)
    axes.set_title(f"{result['title']} ({programs_of(result)})")
    axes.legend(fontsize=6)
    _save(figure, folder / f"{name}.png")


def _bars(
    axes: Any, means: Mapping[str, Mapping[str, float]], xs: Sequence[str]
) -> None:
    width = 0.8 / len(means)
    for index, (arm, own) in enumerate(means.items()):
        places = [xs.index(x) + index * width for x in own]
        axes.bar(places, list(own.values()), width, label=arm)
    axes.set_xticks([i + 0.4 for i in range(len(xs))], xs)


def _draw_overhead(result: Mapping[str, Any], folder: Path) -> None:
    rows = result["rows"]
    figure, axes = plt.subplots(figsize=_SIZE)
    places = range(len(rows))
    axes.bar(
        [p - 0.2 for p in places], [r["plain_ms"] for r in rows], 0.4, label="vLLM"
    )
    axes.bar(
        [p + 0.2 for p in places],
        [r["ours_ms"] for r in rows],
        0.4,
        label="TTLScheduler",
    )
    axes.set_xticks(list(places), [r["load"] for r in rows])
    axes.set_ylabel("CPU ms a step, median")
    axes.legend()
    _save(figure, folder / "overhead.png")


def _draw_pin_vs_reload(result: Mapping[str, Any], folder: Path) -> None:
    figure, axes = plt.subplots(figsize=(5, 4))
    rows = result["recoveries"]
    tokens = [row["context_tokens"] for row in rows]
    for way, marker in zip(WAYS, "os^d", strict=True):
        seconds = [row[f"{way}_s"] for row in rows]
        axes.plot(tokens, seconds, f"{marker}-", label=way)
    axes.set_ylabel("next turn, s")
    axes.set(xlabel="context, tokens", xscale="log", yscale="log")
    axes.legend()
    axes.grid(alpha=0.3)
    _save(figure, folder / "pin-vs-reload.png")


def _save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    # No date, no version: the same numbers give the same file.
    figure.savefig(path, dpi=_DPI, metadata={"Software": None})
    plt.close(figure)
