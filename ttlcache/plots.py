"""Figures of a recording; needs matplotlib (`pip install 'ttlcache[plot]'`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np

mpl.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from ttlcache.perfetto import pinned_over_time
from ttlcache.recording import ProgramLog, Recording

#: Kinds of bar, with colours that differ in lightness too.
COLOURS = {
    "waiting": "#c8332b",
    "running": "#22577a",
    "pinned, claimed": "#80c490",
    "pinned in vain": "#e6b655",
    "gap, not pinned": "#dcdcdc",
}
_MAX_PROGRAMS = 60
_MAX_TOOLS = 8


def draw_all(recording: Recording, folder: Path) -> list[Path]:
    """timeline.png, gaps.png, pinned.png and jct.png in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    shown = min(len(recording.programs), _MAX_PROGRAMS)
    heights = {"timeline": max(3.0, 1.4 + 0.22 * shown)}
    painters: dict[str, Callable[[Recording, Axes], None]] = {
        "timeline": timeline,
        "gaps": gap_curves,
        "pinned": pinned_memory,
        "jct": completion_times,
    }
    paths = []
    for name, paint in painters.items():
        size = (11, heights.get(name, 4.5))
        figure, axis = plt.subplots(figsize=size, layout="constrained")
        paint(recording, axis)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
        path = folder / f"{name}.png"
        figure.savefig(path, dpi=110)
        plt.close(figure)
        paths.append(path)
    return paths


def timeline(recording: Recording, axis: Axes) -> None:
    """One row a program: waiting, running, and what its KV did in the gaps."""
    programs = recording.programs[:_MAX_PROGRAMS]
    origin_s = programs[0].arrive_s
    for row, log in enumerate(programs):
        for kind, bars in _bars(log, origin_s).items():
            axis.broken_barh(
                bars, (row - 0.4, 0.8), facecolors=COLOURS[kind], linewidth=0
            )
    names = [log.program[:24] for log in programs]
    axis.set_yticks(range(len(programs)), names, fontsize=7)
    axis.set_ylim(len(programs) - 0.4, -0.6)
    axis.set_xlabel("seconds since the first arrival")
    axis.set_title(f"{len(programs)} of {len(recording.programs)} programs", loc="left")
    handles = [Patch(color=colour, label=kind) for kind, colour in COLOURS.items()]
    axis.figure.legend(
        handles=handles, loc="outside lower center", ncols=5, frameon=False
    )


def _bars(log: ProgramLog, origin_s: float) -> dict[str, list[tuple[float, float]]]:
    bars: dict[str, list[tuple[float, float]]] = {kind: [] for kind in COLOURS}
    for turn in log.turns:
        arrive_s = turn.arrive_s - origin_s
        wait_s = turn.wait_s or 0.0
        bars["waiting"].append((arrive_s, wait_s))
        if turn.finish_s is None:
            continue
        finish_s = turn.finish_s - origin_s
        bars["running"].append((arrive_s + wait_s, finish_s - arrive_s - wait_s))
        held_s = turn.pin.lived_s if turn.pin is not None else 0.0
        if held_s:
            claimed = turn.pin is not None and turn.pin.outcome == "claimed"
            kind = "pinned, claimed" if claimed else "pinned in vain"
            bars[kind].append((finish_s, held_s))
        if turn.next_gap_s is not None and turn.next_gap_s > held_s:
            left = (finish_s + held_s, turn.next_gap_s - held_s)
            bars["gap, not pinned"].append(left)
    return bars


def gap_curves(recording: Recording, axis: Axes) -> None:
    """Distribution of the gaps after each of the most frequent tools."""
    gaps: dict[str, list[float]] = defaultdict(list)
    for _, turn in recording.turns():
        if turn.next_gap_s is not None:
            tool = turn.decided.tool if turn.decided is not None else "(not known)"
            gaps[tool].append(max(turn.next_gap_s, 1e-3))
    for tool, values in sorted(gaps.items(), key=lambda kv: -len(kv[1]))[:_MAX_TOOLS]:
        # A label that starts with "_", as ours for reserved tools, is left out.
        _curve(axis, values, f"{tool.strip('_')} ({len(values)})")
    axis.set_xscale("log")
    axis.set_xlabel("seconds between a turn's end and the next turn")
    axis.set_ylabel("share of the gaps")
    if gaps:
        axis.legend(frameon=False, fontsize=8)


def pinned_memory(recording: Recording, axis: Axes) -> None:
    """KV blocks held by pins over time."""
    levels = pinned_over_time(recording)
    if levels:
        origin_s = recording.programs[0].arrive_s
        times = [now_s - origin_s for now_s, _ in levels]
        blocks = [count for _, count in levels]
        axis.fill_between(times, blocks, step="post", color="#80c490")
    pools = {int(run.get("pool_blocks", 0)) for run in recording.runs.values()} - {0}
    if len(pools) == 1:
        axis.axhline(pools.pop(), color="#22577a", linewidth=1, label="KV pool")
        axis.legend(frameon=False)
    axis.set_ylim(bottom=0)
    axis.set_xlabel("seconds since the first arrival")
    axis.set_ylabel("KV blocks pinned")


def completion_times(recording: Recording, axis: Axes) -> None:
    """Distribution of the programs' job completion times."""
    jcts = [s for log in recording.programs if (s := log.jct_s) is not None]
    if jcts:
        _curve(axis, jcts, f"{len(jcts)} programs, mean {np.mean(jcts):.3g} s")
        axis.legend(frameon=False)
    axis.set_xlabel("job completion time, seconds")
    axis.set_ylabel("share of the programs")


def _curve(axis: Axes, values: Sequence[float], label: str) -> None:
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    shares = np.arange(1, len(ordered) + 1) / len(ordered)
    axis.step(ordered, shares, where="post", label=label)
    axis.set_ylim(0, 1.02)
