"""Draws what each program did when: one panel an arm, one row a program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.patches import Patch

from bench.sim.metrics import TurnRecord, by_program, kept_gaps, summarize
from ttlcache.analysis.timeline import draw_rows

#: Kinds of bar in legend order, with colours that differ in lightness too.
WAITING = "waiting"
RUNNING = "running"
GAP_KEPT = "tool gap, KV kept"
GAP_LOST = "tool gap, KV lost"
COLOURS = {
    WAITING: "#c8332b",
    RUNNING: "#22577a",
    GAP_KEPT: "#80c490",
    GAP_LOST: "#dcdcdc",
}
_ROW_INCHES = 0.24
_PANEL_INCHES = 1.1

#: (start, length) by kind, in seconds since the replay's start.
Bars = dict[str, list[tuple[float, float]]]


def bars(records: Sequence[TurnRecord]) -> dict[str, Bars]:
    """Bars of each program; programs by first arrival.

    A gap counts as "KV kept" when the turn after it found its context cached
    (:func:`bench.sim.metrics.kept_gaps`): pinned, or not evicted by luck.
    """
    kept = kept_gaps(records)
    rows: dict[str, Bars] = {}
    for program_id, own in by_program(records).items():
        row: Bars = {kind: [] for kind in COLOURS}
        rows[program_id] = row
        for index, record in enumerate(own):
            started_s = min(record.arrival_s + record.queue_s, record.departure_s)
            row[WAITING].append((record.arrival_s, started_s - record.arrival_s))
            row[RUNNING].append((started_s, record.departure_s - started_s))
            if index + 1 < len(own):
                kind = GAP_KEPT if kept[program_id, record.turn] else GAP_LOST
                gap_s = own[index + 1].arrival_s - record.departure_s
                row[kind].append((record.departure_s, gap_s))
    return rows


def draw(arms: Mapping[str, Sequence[TurnRecord]], path: Path, title: str) -> None:
    """Write the timeline of all arms as a PNG.

    Args:
        arms: records by arm name, drawn top to bottom on one time axis.
        path: file to write.
        title: heading of the figure.
    """
    panels = {name: bars(records) for name, records in arms.items()}
    heights = [_PANEL_INCHES + _ROW_INCHES * len(panel) for panel in panels.values()]
    figure, axes = plt.subplots(
        len(panels),
        1,
        sharex=True,
        squeeze=False,
        figsize=(12, sum(heights) + 0.6),
        gridspec_kw={"height_ratios": heights},
        layout="constrained",
    )
    for axis, (name, programs) in zip(axes[:, 0], panels.items(), strict=True):
        draw_rows(axis, list(programs.values()), list(programs), COLOURS)
        axis.spines[["top", "right"]].set_visible(False)
        summary = summarize(arms[name])
        axis.set_title(
            f"{name}: mean JCT {summary.mean_jct_s:.1f} s, "
            f"prompt hit {summary.prompt_hit:.0%}, "
            f"mean wait {summary.mean_wait_s:.2f} s",
            loc="left",
            fontsize=11,
        )
    axes[-1, 0].set_xlabel("seconds since the first arrival")
    axes[-1, 0].set_xlim(left=0)
    figure.suptitle(title, fontsize=12)
    figure.legend(
        handles=[Patch(color=colour, label=kind) for kind, colour in COLOURS.items()],
        loc="outside lower center",
        ncols=len(COLOURS),
        frameon=False,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)
