"""One PNG a figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

from bench.report.figures.results import by_arm
from bench.report.figures.servers import PREFIX

_SIZE = (7.5, 4.0)
_DPI = 110
#: Sweeps whose x is no axis.
_BARS = ("ablation", "rollout", "platforms", "platforms-dram", "ssd")
#: Points whose names are longer than this stand aslant.
_LONG_NAME = 9
#: Where a context is, as the result of `bench pin-vs-reload` names it.
_WAYS = {"claimed": "o", "cpu": "s", "disk": "^", "prefill": "d"}


def draw(name: str, result: Mapping[str, Any], folder: Path) -> None:
    """`name`.png; what has no x has a table alone."""
    if name == "overhead":
        figure = _overhead(result)
    elif name == "pin-vs-reload":
        figure = _pin_vs_reload(result)
    elif name in ("demo", "validate") or name.startswith(("grid", PREFIX)):
        return
    else:
        figure = _sweep(name, result)
    figure.tight_layout()
    folder.mkdir(parents=True, exist_ok=True)
    # No date, no version: the same numbers give the same file.
    path = folder / f"{name}.png"
    figure.savefig(path, dpi=_DPI, metadata={"Software": None})
    plt.close(figure)


def _sweep(name: str, result: Mapping[str, Any]) -> Any:
    figure, axes = plt.subplots(figsize=_SIZE)
    xs = list(dict.fromkeys(row["x"] for row in result["rows"]))
    key, title = result["drawn"]
    means = by_arm(result, key)
    if name in _BARS:
        _bars(axes, means, xs)
    else:
        for arm, own in means.items():
            points = [xs.index(x) for x in own]
            axes.plot(points, list(own.values()), marker="o", label=arm)
        axes.set_xticks(range(len(xs)), xs)
    if max(map(len, xs)) > _LONG_NAME:
        plt.setp(axes.get_xticklabels(), rotation=30, ha="right", fontsize=7)
    axes.set_xlabel(result["x"])
    axes.set_ylabel(title)
    roofline = result.get("roofline") and f"roofline: {result['roofline']}"
    axes.set_title(
        "\n".join(filter(None, (result["title"], result["programs"], roofline))),
        fontsize=9,
    )
    axes.legend(fontsize=6)
    return figure


def _bars(
    axes: Any, means: Mapping[str, Mapping[str, float]], xs: Sequence[str]
) -> None:
    width = 0.8 / len(means)
    for index, (arm, own) in enumerate(means.items()):
        places = [xs.index(x) + index * width for x in own]
        axes.bar(places, list(own.values()), width, label=arm)
    axes.set_xticks([i + 0.4 for i in range(len(xs))], xs)


def _overhead(result: Mapping[str, Any]) -> Any:
    figure, axes = plt.subplots(figsize=_SIZE)
    rows, places = result["rows"], range(len(result["rows"]))
    for key, name, side in (
        ("plain_ms", "vLLM", -0.2),
        ("ours_ms", "TTLScheduler", 0.2),
    ):
        axes.bar([p + side for p in places], [r[key] for r in rows], 0.4, label=name)
    axes.set_xticks(list(places), [r["load"] for r in rows])
    axes.set_ylabel("CPU ms a step, median")
    axes.legend()
    return figure


def _pin_vs_reload(result: Mapping[str, Any]) -> Any:
    figure, axes = plt.subplots(figsize=(5, 4))
    rows = result["recoveries"]
    tokens = [row["context_tokens"] for row in rows]
    for way, marker in _WAYS.items():
        seconds = [row[f"{way}_s"] for row in rows]
        axes.plot(tokens, seconds, f"{marker}-", label=way)
    axes.set_ylabel("next turn, s")
    axes.set(xlabel="context, tokens", xscale="log", yscale="log")
    axes.legend()
    axes.grid(alpha=0.3)
    return figure
