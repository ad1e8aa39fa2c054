"""Figures of a recording; needs matplotlib (`pip install 'ttlcache[plot]'`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path

import matplotlib as mpl
import numpy as np

mpl.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.ticker import LogFormatter

from ttlcache.analysis.recording import (
    Interval,
    ProgramLog,
    Recording,
    held_in_vain,
    pinned_over_time,
)

#: Kinds of bar, later ones over earlier ones; colours differ in lightness, too.
COLOURS = {
    "waiting": "#c8332b",
    "running": "#22577a",
    "pinned, claimed": "#80c490",
    "idle memory, pinned": "#cfe3f5",
    "pinned in vain": "#e6b655",
    "pinned, no next turn": "#8d5a97",
    "gap, not pinned": "#dcdcdc",
}
_HELD, _POOL = COLOURS["pinned, claimed"], COLOURS["running"]
_MAX_PROGRAMS = 60
_MAX_TOOLS = 8


def draw_all(recording: Recording, folder: Path) -> list[Path]:
    """timeline.png, gaps.png, pinned.png and jct.png in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    shown = min(len(recording.programs), _MAX_PROGRAMS)
    heights = {"timeline": max(3.0, 1.4 + 0.22 * shown)}
    mpl.rcParams.update({"font.size": 10, "axes.titlesize": 12, "axes.titlepad": 10})
    mpl.rcParams["axes.axisbelow"] = True
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
    wanted = {log.run: recording.wanted(log.run) for log in programs}
    rows = [spans_of(log, wanted[log.run], origin_s) for log in programs]
    draw_rows(axis, rows, [_literal(log.program[:24]) for log in programs], COLOURS)
    axis.set_xlim(left=0)
    axis.set_xlabel("seconds since the first arrival")
    count = len(recording.programs)
    part = "" if len(programs) == count else f", the first {len(programs)} of {count}"
    axis.set_title(f"Programs over time{part}", loc="left")
    handles = [Patch(color=colour, label=kind) for kind, colour in COLOURS.items()]
    axis.figure.legend(
        handles=handles, loc="outside lower center", ncols=4, frameon=False
    )


def draw_rows(
    axis: Axes,
    rows: Sequence[Mapping[str, Sequence[Interval]]],
    names: Sequence[str],
    colours: Mapping[str, str],
) -> None:
    """One row each, the first on top; (start, length) of its bars by kind."""
    for place, bars in enumerate(rows):
        for kind, colour in colours.items():
            axis.broken_barh(
                bars[kind], (place - 0.4, 0.8), facecolors=colour, linewidth=0
            )
    axis.set_yticks(range(len(rows)), names, fontsize=7)
    axis.set_ylim(len(rows) - 0.4, -0.6)


def spans_of(
    log: ProgramLog, wanted: Sequence[Interval], origin_s: float
) -> dict[str, list[Interval]]:
    """(start, length) of each kind. wanted: when a request lacked memory."""
    bars: dict[str, list[Interval]] = {kind: [] for kind in COLOURS}
    for turn in log.turns:
        arrive_s = turn.arrive_s - origin_s
        admit_s = arrive_s if turn.admit_s is None else turn.admit_s - origin_s
        bars["waiting"].append((arrive_s, admit_s - arrive_s))
        if turn.finish_s is None:
            continue
        finish_s = turn.finish_s - origin_s
        bars["running"].append((admit_s, finish_s - admit_s))
        held_s = turn.pin.lived_s if turn.pin is not None else 0.0
        if turn.pin is not None and held_s:
            is_claimed = turn.pin.outcome == "claimed"
            kind = "pinned, claimed" if is_claimed else "idle memory, pinned"
            bars[kind].append((finish_s, held_s))
            # Drawn over what was idle around it.
            is_last = turn.next_gap_s is None
            kind = "pinned, no next turn" if is_last else "pinned in vain"
            bars[kind] += _lengths(held_in_vain(turn.pin, wanted), origin_s)
        if turn.next_gap_s is not None and turn.next_gap_s > held_s:
            left = (finish_s + held_s, turn.next_gap_s - held_s)
            bars["gap, not pinned"].append(left)
    return bars


def _lengths(intervals: Sequence[Interval], origin_s: float) -> list[Interval]:
    return [(start_s - origin_s, end_s - start_s) for start_s, end_s in intervals]


def _literal(name: str) -> str:
    """What stands between two dollar signs is a formula, and may be no valid one."""
    return name.replace("$", r"\$")


def gap_curves(recording: Recording, axis: Axes) -> None:
    """Distribution of the gaps after each of the most frequent tools."""
    gaps = recording.gaps_by_tool()
    for tool, gaps_s in islice(gaps.items(), _MAX_TOOLS):
        values = [max(gap_s, 1e-3) for gap_s in gaps_s]
        # A label that starts with "_", as ours for reserved tools, is left out.
        _curve(axis, values, f"{_literal(tool.strip('_'))} ({len(values)})")
    axis.set_xscale("log")
    axis.xaxis.set_major_formatter(_Seconds())
    axis.xaxis.set_minor_formatter(_Seconds())
    axis.grid(which="major", color="#eeeeee")
    axis.set_xlabel("time between a turn's end and the next turn")
    axis.set_ylabel("share of the gaps")
    axis.set_title("Gaps by tool (cumulative)", loc="left")
    if gaps:
        # Beside the axes: curves of short and of long tools fill every corner.
        axis.figure.legend(
            loc="outside right upper", frameon=False, title="tool (gaps)"
        )


class _Seconds(LogFormatter):
    """Labels the ticks that matplotlib would, but as `2 s`."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        return f"{x:g} s" if super().__call__(x, pos) else ""


def pinned_memory(recording: Recording, axis: Axes) -> None:
    """KV blocks held by pins over time."""
    origin_s = recording.programs[0].arrive_s
    end_s = recording.last_s - origin_s
    levels = [(now_s - origin_s, count) for now_s, count in pinned_over_time(recording)]
    if levels:
        levels = [(0.0, 0), *levels, (end_s, levels[-1][1])]
        times, blocks = zip(*levels, strict=True)
        axis.fill_between(times, blocks, step="post", color=_HELD, label="pins")
    pools = {int(run.get("pool_blocks", 0)) for run in recording.runs.values()} - {0}
    if len(pools) == 1:
        pool = pools.pop()
        axis.axhline(pool, color=_POOL, linewidth=1.2, label=f"KV pool, {pool:,}")
    axis.set_ylim(bottom=0)
    axis.set_xlim(0, max(end_s, 1e-3))
    axis.set_xlabel("seconds since the first arrival")
    axis.set_ylabel("KV blocks")
    axis.set_title(
        "Memory held by pins (a block that two pins share counts twice)", loc="left"
    )
    axis.figure.legend(loc="outside right upper", frameon=False)


def completion_times(recording: Recording, axis: Axes) -> None:
    """Distribution of the programs' job completion times."""
    jcts = [s for log in recording.programs if (s := log.jct_s) is not None]
    if jcts:
        _curve(axis, jcts, f"{len(jcts)} programs")
        mean_s = float(np.mean(jcts))
        axis.axvline(
            mean_s, color="#777777", linestyle="--", label=f"mean {mean_s:.3g} s"
        )
        axis.legend(frameon=False, loc="lower right")
    axis.grid(color="#eeeeee")
    axis.set_xlim(left=0)
    axis.set_xlabel("job completion time, seconds")
    axis.set_ylabel("share of the programs")
    axis.set_title("Job completion times (cumulative)", loc="left")


def _curve(axis: Axes, values: Sequence[float], label: str) -> None:
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    ordered = np.concatenate([ordered[:1], ordered])  # rises from 0
    shares = np.arange(len(ordered)) / (len(ordered) - 1)
    axis.step(ordered, shares, where="post", label=label)
    axis.set_ylim(0, 1.02)
