"""What the fleet demo says: its table, its verdict, what a death cost."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from bench.compare.fleet.arms import ROUND_ROBIN, WITH_TIER, FleetResult
from bench.compare.report import problems_of
from bench.tables import table
from ttlcache_sim.metrics import OutputComparison, by_program, compare_outputs

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


def results(done: list[dict[str, FleetResult]]) -> tuple[dict[str, Any], list[str]]:
    """The arms so far as they stand in result.json, and what is wrong with them.

    Outputs are compared with the first arm's.
    """
    arms = list(done[0].values())
    found = [
        problem
        for arm in arms
        for problem in problems(arm, compare_outputs(arms[0].records, arm.records))
    ]
    return {"arms": {arm.name: arm_json(arm) for arm in arms}}, found


def arm_json(result: FleetResult) -> dict[str, Any]:
    """One arm as it stands in result.json."""
    return {
        **asdict(result.summary),
        "gpu_hit": result.gpu_hit,
        "reloaded": result.reloaded,
        "stayed": result.stayed,
        "turns_by_replica": result.turns_by_replica,
        "retried": [asdict(failure) for failure in result.retried],
        "failures": [asdict(failure) for failure in result.failures],
        "log_errors": list(result.log_errors),
        "engines": [asdict(engine) for engine in result.engines],
        "death": None if result.death is None else asdict(result.death),
        "migration": migration(result),
    }


def arms_table(results: Sequence[FleetResult]) -> Table:
    """A row an arm."""
    rows = []
    for result in results:
        base = _round_robin(result, results)
        summary = result.summary
        spread = result.turns_by_replica.values()
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
    if (death := result.death) is None:
        return None
    moved = [
        after
        for own in by_program(result.records).values()
        for before, after in itertools.pairwise(own)
        if before.server == death.server != after.server
    ]
    return {
        "moved_programs": len(moved),
        "whole_prefills": sum(record.cached_tokens == 0 for record in moved),
        "context_tokens": sum(record.prompt_tokens for record in moved),
        "found_tokens": sum(record.cached_tokens for record in moved),
        "reloaded_tokens": sum(
            sum(engine.reloaded_tokens.values()) for engine in result.engines
        ),
        "failed_reloads": sum(engine.failed_reloads for engine in result.engines),
    }


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
