"""What the rows of a grid say: the same tables for the terminal and the pages."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from bench.ratios import geometric_mean
from ttlcache_sim.bootstrap import Interval

#: Not a rival: it knows the future.
REFERENCE = "oracle"
OURS, PLAIN = "adaptive", "vllm"
#: CacheTTL, three ways to read it. The best one of a cell is its base.
READINGS = ("cachettl", "cachettl-paper", "cachettl-strict")
#: A cell has headroom if the reference takes at most so much of the best rival's JCT.
HEADROOM = 0.97
#: How well a ratio to the base is to be known, as a share of it.
HALF_WIDTH = 0.02
#: Within this share nobody is ahead.
TIE = 1.01
#: An arm whose whole interval is above this needs no better one.
FAR = 1.10
#: Cells shown at either end, where there are too many for a page.
_EXTREMES = 2

Row = Mapping[str, Any]
#: Header and body.
Cells = tuple[list[str], list[list[str]]]


def label(row: Row) -> str:
    return f"{row['workload']} {row['pool']} {row['load']:g}"


def interval(row: Row, arm: str) -> Interval:
    """Mean JCT over that of the cell's base."""
    return Interval(*row["arms"][arm]["over_base"])


def is_settled(ratio: Interval) -> bool:
    return ratio.half_width <= HALF_WIDTH or ratio.low > FAR


def best_rival(row: Row) -> str:
    """The best other arm that knows no future, of the seeds that all arms have."""
    arms = row["arms"]
    rivals: list[str] = [arm for arm in arms if _is_online(arm) and arm != OURS]
    return min(rivals, key=lambda arm: float(arms[arm]["mean_jct_s"]))


def over_best(row: Row) -> float:
    """Our mean JCT over that of the best rival."""
    arms = row["arms"]
    return float(arms[OURS]["mean_jct_s"] / arms[best_rival(row)]["mean_jct_s"])


def has_headroom(row: Row) -> bool:
    arms = row["arms"]
    best_s = min(arms[arm]["mean_jct_s"] for arm in arms if _is_online(arm))
    return bool(arms[REFERENCE]["mean_jct_s"] <= HEADROOM * best_s)


def _is_online(arm: str) -> bool:
    """Variants of our own ("adaptive:…") are no rivals."""
    return arm != REFERENCE and not arm.startswith(f"{OURS}:")


def verdict(rows: Sequence[Row]) -> Cells:
    """Ours against the base and the best rival, with headroom and without."""
    header = ["cells", "number", f"{OURS} / base", "/ best rival", "worst cell"]
    header += ["ahead", "behind", "known to 2 %"]
    if not rows or not {OURS, *READINGS[:1]} <= rows[0]["arms"].keys():
        return header, []
    groups = {"all": list(rows)}
    if REFERENCE in rows[0]["arms"]:
        groups = {
            "with headroom": [row for row in rows if has_headroom(row)],
            "without": [row for row in rows if not has_headroom(row)],
        } | groups
    return header, [_group(name, own) for name, own in groups.items() if own]


def _group(name: str, rows: Sequence[Row]) -> list[str]:
    ours = geometric_mean([interval(row, OURS) for row in rows])
    best = {label(row): over_best(row) for row in rows}
    worst = max(best, key=lambda cell: best[cell])
    known = sum(interval(row, OURS).half_width <= HALF_WIDTH for row in rows)
    return [
        name,
        str(len(rows)),
        str(ours),
        f"{statistics.geometric_mean(best.values()):.3f}",
        f"{best[worst]:.3f} {worst}",
        str(sum(ratio < 1 / TIE for ratio in best.values())),
        str(sum(ratio > TIE for ratio in best.values())),
        str(known),
    ]


def cells(rows: Sequence[Row]) -> Cells:
    """Mean JCT over the base's; ~ where the interval is wider than 2 % each way."""
    arms = list(rows[0]["arms"])
    body = []
    for row in rows:
        base = row["arms"][row["base"]]
        found = [interval(row, arm) for arm in arms]
        marks = ["" if each.half_width <= HALF_WIDTH else "~" for each in found]
        ratios = [f"{each.ratio:.2f}{m}" for each, m in zip(found, marks, strict=True)]
        per_s = f"{row['rate']:.3g}"
        body.append(
            [label(row), per_s, f"{base['mean_jct_s']:.0f} {row['base']}", *ratios]
        )
    return ["cell", "programs/s", "base, s", *arms], body


def cells_against_best(rows: Sequence[Row]) -> Cells:
    """Ours against the base and the best rival; of many cells the two at each end."""
    shown = list(rows)
    if len(rows) > 2 * _EXTREMES:
        order = sorted(rows, key=over_best)
        shown = order[:_EXTREMES] + order[-_EXTREMES:]
    body = [
        [label(row), str(interval(row, OURS)), best_rival(row), f"{over_best(row):.3f}"]
        for row in shown
    ]
    return ["cell", f"{OURS} / base", "best rival", f"{OURS} / it"], body


def behind(rows: Sequence[Row]) -> list[str]:
    """All cells in which another arm that knows no future is ahead by over 1 %."""
    ratios = ((row, over_best(row)) for row in rows)
    return [
        f"{label(row)} (`{best_rival(row)}` by {100 * (ratio - 1):.1f} %)"
        for row, ratio in ratios
        if ratio > TIE
    ]


def arms(rows: Sequence[Row]) -> Cells:
    """Geometric means over the base's by load, percentiles, and the share held."""
    loads = list(dict.fromkeys(row["load"] for row in rows))
    keys = ("p50_jct_s", "p95_jct_s", "p99_jct_s", "worst_turn_s", "p95_ttft_s")
    body = []
    for arm in sorted(rows[0]["arms"], key=lambda arm: _over(rows, arm).ratio):
        by_load = [_over([r for r in rows if r["load"] == x], arm) for x in loads]
        others = [
            statistics.geometric_mean(
                row["arms"][arm][key] / row["arms"][row["base"]][key] for row in rows
            )
            for key in keys
        ]
        held = statistics.fmean(row["arms"][arm]["held"] for row in rows)
        seeds = sum(row["arms"][arm]["seeds"] for row in rows)
        body.append(
            [
                f"`{arm}`",
                *(f"{each.ratio:.3f}" for each in by_load),
                str(_over(rows, arm)),
                *(f"{ratio:.2f}" for ratio in others),
                f"{100 * held:.0f} %",
                str(seeds),
            ]
        )
    header = ["arm", *(f"load {load:g}" for load in loads), "all", "p50", "p95", "p99"]
    return [*header, "worst turn", "TTFT p95", "held", "runs"], body


def _over(rows: Sequence[Row], arm: str) -> Interval:
    return geometric_mean([interval(row, arm) for row in rows])


def caveats(rows: Sequence[Row]) -> list[str]:
    """What was cut or repeated, by workload."""
    told = {row["workload"]: row["caveat"] for row in rows if row["caveat"]}
    words = {
        "programs are cut to the model's context": "programs cut to the window",
        "each program of the trace comes": "each program comes",
    }
    for long, short in words.items():
        told = {name: caveat.replace(long, short) for name, caveat in told.items()}
    return [f"{workload}: {caveat}" for workload, caveat in told.items()]
