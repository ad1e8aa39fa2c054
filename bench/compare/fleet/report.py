"""What the fleet demo says: its table, its verdict, what a death cost, its bars."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt
from rich.table import Table

from bench.compare.demo_report import problems_of
from bench.compare.fleet.arms import (
    ROUND_ROBIN,
    WITH_TIER,
    FleetResult,
    turns_by_replica,
)
from bench.sim.metrics import OutputComparison, TurnRecord, by_program
from bench.tables import table

_COLUMNS = (
    "routing",
    "GPU hit",
    "x round robin",
    "from LMCache",
    "stayed",
    "turns a replica",
    "mean JCT s",
    "mean TTFT s",
    "retried",
)


def arms_table(results: Sequence[FleetResult]) -> Table:
    """A row an arm."""
    rows = []
    for result in results:
        base = _round_robin(result, results)
        summary = result.summary
        spread = turns_by_replica(result.records).values()
        row = [
            result.name,
            f"{result.gpu_hit:.1%}",
            f"{result.gpu_hit / base:.2f}" if base else "",
            f"{result.reloaded:.1%}",
            f"{result.stayed:.0%}",
            " + ".join(str(turns) for turns in spread),
            f"{summary.mean_jct_s:.1f}",
            f"{summary.mean_ttft_s:.2f}",
            str(len(result.retried)),
        ]
        rows.append(row)
    return table("the same programs, replicas and pools", _COLUMNS, rows)


def _round_robin(result: FleetResult, results: Sequence[FleetResult]) -> float:
    """GPU hit of round robin with the same tiers; 0 where that was not run."""
    tier = WITH_TIER if result.name.endswith(WITH_TIER) else ""
    return next((r.gpu_hit for r in results if r.name == ROUND_ROBIN + tier), 0.0)


def problems(result: FleetResult, outputs: OutputComparison) -> list[str]:
    """Why the demo must not end with exit status 0."""
    found = problems_of(
        result.name,
        result.failures,
        result.log_errors,
        "the replicas' logs",
        outputs,
        "the first arm",
    )
    if result.death is None and result.retried:
        found.append(
            f"{result.name}: {len(result.retried)} requests failed though every "
            f"replica lived, e.g. {result.retried[0].reason}"
        )
    return found


def migration(result: FleetResult) -> dict[str, Any] | None:
    """What became of the programs of a replica that died; None where none did."""
    if result.death is None:
        return None
    moved = moved_turns(result)
    return {
        "moved_programs": len(moved),
        "whole_prefills": sum(record.cached_tokens == 0 for record in moved),
        "context_tokens": sum(record.prompt_tokens for record in moved),
        "found_tokens": sum(record.cached_tokens for record in moved),
        "reloaded_tokens": _reloaded(result),
        "failed_reloads": sum(engine.failed_reloads for engine in result.engines),
    }


def moved_turns(result: FleetResult) -> list[TurnRecord]:
    """Of each program whose replica died: its first turn elsewhere."""
    assert result.death is not None
    return [
        after
        for own in by_program(result.records).values()
        for before, after in itertools.pairwise(own)
        if before.server == result.death.server != after.server
    ]


def deaths(results: Sequence[FleetResult]) -> list[str]:
    """One line an arm in which a replica was killed."""
    lines = []
    for result in results:
        facts = migration(result)
        if facts is None or result.death is None:
            continue
        lines.append(
            f"{result.name}: {result.death.server} was killed at "
            f"{result.death.at_s:.1f} s; {len(result.failures)} programs lost, "
            f"{len(result.retried)} requests sent again, "
            f"{facts['moved_programs']} programs moved, which found "
            f"{facts['found_tokens']:,} of {facts['context_tokens']:,} prompt tokens; "
            f"{facts['whole_prefills']} were prefilled whole, "
            f"{facts['failed_reloads']:.0f} reloads failed"
        )
    return lines


def _reloaded(result: FleetResult) -> int:
    return sum(sum(engine.reloaded_tokens.values()) for engine in result.engines)


def draw(results: Sequence[FleetResult], path: Path) -> Path:
    """Where prompt tokens came from, and how long jobs took; returns `path`."""
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
