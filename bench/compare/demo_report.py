"""What the demo says: result.json, the side-by-side table, the verdict."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from bench.serve.arms import ArmResult
from bench.serve.replay import Failure
from bench.sim.metrics import OutputComparison, compare_outputs

#: Bar on the first output token's log-probability between the arms.
MAX_LOGPROB_DIFF = 1e-3
#: Outcomes of the table's first pin rows, in this order; others follow by name.
_OUTCOMES = ("claimed", "expired", "victim", "superseded", "ended")


def arm_json(arm: ArmResult) -> dict[str, Any]:
    """One arm as it stands in result.json."""
    return {
        **asdict(arm.summary),
        **asdict(arm.engine),
        "computed_prompt_tokens": computed_tokens(arm),
        "engine_prompt_hit": arm.engine.prompt_hit,
        "engine_mean_wait_s": arm.engine.mean_wait_s,
        "start_up_s": arm.start_up_s,
        "replay_s": arm.replay_s,
        "failures": [asdict(failure) for failure in arm.failures],
        "log_errors": list(arm.log_errors),
        "log": str(arm.log_path),
        "command": list(arm.command),
    }


def computed_tokens(arm: ArmResult) -> int:
    """Prompt tokens that the engine prefilled: all less those found in a cache."""
    return arm.summary.prompt_tokens - arm.summary.cached_tokens


def savings(plain: ArmResult, ours: ArmResult) -> dict[str, float | None]:
    """Saved tokens as ttlcache tells them, and as the two arms measure them.

    The ratio is told / measured, None where nothing was saved.
    """
    told = ours.engine.prefill_tokens_saved
    measured = computed_tokens(plain) - computed_tokens(ours)
    return {
        "told_tokens": told,
        "measured_tokens": measured,
        "ratio": told / measured if measured > 0 else None,
    }


def outputs_of(arms: Sequence[ArmResult]) -> OutputComparison:
    """Every arm against the first: all differences, the largest one of logprobs."""
    found = [compare_outputs(arms[0].records, arm.records) for arm in arms[1:]]
    return OutputComparison(
        all(one.tokens_identical for one in found),
        tuple(sorted({turn for one in found for turn in one.differing_turns})),
        max((one.first_token_logprob_max_diff for one in found), default=0.0),
    )


def problems(arms: Sequence[ArmResult]) -> list[str]:
    """Why the arms, which should answer alike, must not end with exit status 0.

    Outputs are compared with the first arm's; empty when all is well.
    """
    base = arms[0]
    return [
        problem
        for arm in arms
        for problem in problems_of(
            arm.name,
            arm.failures,
            arm.log_errors,
            str(arm.log_path),
            compare_outputs(base.records, arm.records),
            base.name,
        )
    ]


def problems_of(
    name: str,
    failures: Sequence[Failure],
    log_errors: Sequence[str],
    log: str,
    outputs: OutputComparison,
    base: str,
) -> list[str]:
    """What is wrong with one arm, whose outputs were compared with the arm `base`."""
    found = []
    if failures:
        first = failures[0]
        found.append(
            f"{name}: {len(failures)} failed requests, e.g. "
            f"{first.program_id} turn {first.turn}: {first.reason}"
        )
    if log_errors:
        found.append(f"{name}: {len(log_errors)} errors in {log}, e.g. {log_errors[0]}")
    if not outputs.tokens_identical:
        program_id, turn = outputs.differing_turns[0]
        found.append(
            f"{name}: outputs differ from {base}'s in {len(outputs.differing_turns)} "
            f"turns, e.g. {program_id} turn {turn}"
        )
    diff = outputs.first_token_logprob_max_diff
    if math.isnan(diff) or diff > MAX_LOGPROB_DIFF:
        found.append(
            f"{name}: first-token logprobs differ by {diff:.2g} from {base}'s, "
            f"allowed {MAX_LOGPROB_DIFF:g}"
        )
    return found


def _add_savings(grid: Table, pairs: Sequence[tuple[ArmResult, ArmResult]]) -> None:
    """Prompt tokens computed, and those that ttlcache saved of them."""
    rows: dict[str, list[str]] = {
        "prompt tokens computed": [],
        "  fewer than without": [],
        "  saved, as ttlcache tells": [],
        "  served from pins": [],
    }
    computed, fewer, told, claimed = rows.values()
    for plain, ours in pairs:
        saved = savings(plain, ours)
        ratio = saved["ratio"]
        computed += [f"{computed_tokens(arm):,}" for arm in (plain, ours)] + [""]
        fewer += ["", f"{saved['measured_tokens']:,}", ""]
        told += ["", f"{saved['told_tokens']:,.0f}"]
        told.append("" if ratio is None else f"{ratio:.2f}x")
        claimed += ["", f"{ours.engine.claimed_tokens:,.0f}", ""]
    for label, cells in rows.items():
        grid.add_row(label, *cells)
    grid.add_section()


def table(pairs: Sequence[tuple[ArmResult, ArmResult]]) -> Table:
    """Arms side by side, after each pair the ratio of its second to its first."""
    grid = Table(title="the same programs, server and KV pool", title_justify="left")
    grid.add_column("")
    for pair in pairs:
        for arm in pair:
            grid.add_column(arm.name, justify="right")
        grid.add_column("ratio", justify="right")
    for label, name, unit in (
        ("mean JCT", "mean_jct_s", " s"),
        ("p50 JCT", "p50_jct_s", " s"),
        ("p95 JCT", "p95_jct_s", " s"),
        ("p99 of a turn", "p99_turn_s", " s"),
        ("time to 90 % of programs", "time_to_90pct_s", " s"),
        ("output tokens a second", "output_tokens_per_s", ""),
        ("prompt hit", "prompt_hit", ""),
        ("gaps survived by the KV", "kept_gap_share", ""),
        ("mean wait a turn", "mean_wait_s", " s"),
        ("mean time to first token", "mean_ttft_s", " s"),
    ):
        cells = []
        for pair in pairs:
            left, right = (getattr(arm.summary, name) for arm in pair)
            cells += [f"{left:.3g}{unit}", f"{right:.3g}{unit}", _ratio(left, right)]
        grid.add_row(label, *cells)
    grid.add_section()
    _add_savings(grid, pairs)
    arms = [arm for pair in pairs for arm in pair]
    for outcome in _outcomes(*(arm.engine.pins for arm in arms)):
        grid.add_row(f"pins {outcome}", *_cells(pairs, "pins", outcome))
    if any(arm.engine.tier_bytes for arm in arms):
        for direction in ("demoted", "promoted"):
            grid.add_row(
                f"MB {direction}", *_cells(pairs, "tier_bytes", direction, 1e-6)
            )
    grid.add_section()
    outputs = outputs_of(arms)
    identical = "yes" if outputs.tokens_identical else "NO"
    grid.add_row("tokens identical", "", identical)
    diff = outputs.first_token_logprob_max_diff
    grid.add_row("first-token logprob, max difference", "", f"{diff:.1e}")
    return grid


def _cells(
    pairs: Sequence[tuple[ArmResult, ArmResult]],
    counts: str,
    name: str,
    unit: float = 1.0,
) -> list[str]:
    cells = []
    for pair in pairs:
        for arm in pair:
            count = getattr(arm.engine, counts).get(name)
            cells.append("-" if count is None else f"{count * unit:.0f}")
        cells.append("")
    return cells


def _ratio(left: float, right: float) -> str:
    return f"{right / left:.2f}x" if left else ""


def _outcomes(*pins: Mapping[str, int]) -> list[str]:
    others = {outcome for own in pins for outcome in own} - set(_OUTCOMES)
    return [*_OUTCOMES, *sorted(others)]
