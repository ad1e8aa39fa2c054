"""What is said of arms on the same programs: JSON, table, ratios, verdict."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from rich.table import Table

from bench.ratios import Ratio
from bench.serve.arms import ArmResult
from bench.serve.replay import Failure
from bench.tables import table
from ttlcache_sim.metrics import OutputComparison, compare_outputs

#: Bar on the first output token's log-probability between the arms.
MAX_LOGPROB_DIFF = 1e-3
#: What arms are compared by: the name in a summary, the name in print.
COMPARED = {
    "mean_jct_s": "mean JCT",
    "output_tokens_per_s": "tokens a second",
    "p99_turn_s": "turn p99",
}
#: The rows of the table.
_MEASURES: Mapping[str, Callable[[ArmResult], float]] = {
    "mean JCT, s": lambda arm: arm.summary.mean_jct_s,
    "p95 JCT, s": lambda arm: arm.summary.p95_jct_s,
    "p99 of a turn, s": lambda arm: arm.summary.p99_turn_s,
    "mean time to first token, s": lambda arm: arm.summary.mean_ttft_s,
    "mean wait a turn, s": lambda arm: arm.summary.mean_wait_s,
    "requests running": lambda arm: arm.summary.mean_running,
    "output tokens a second": lambda arm: arm.summary.output_tokens_per_s,
    "prompt hit": lambda arm: arm.summary.prompt_hit,
    "gaps survived by the KV": lambda arm: arm.summary.kept_gap_share,
    "prompt tokens computed": lambda arm: computed_tokens(arm),
    "engine steps": lambda arm: arm.engine.steps,
    "tokens computed in them": lambda arm: arm.engine.step_tokens,
    "tokens claimed from pins": lambda arm: arm.engine.claimed_tokens,
    "tokens that the tier held": lambda arm: arm.engine.lower_tier_hits,
    "server waited for a core, %": lambda arm: 100 * arm.wait_share,
}

#: Results by arm, of each round.
Rounds = list[dict[str, ArmResult]]


def arm_json(arm: ArmResult) -> dict[str, Any]:
    """One arm as it stands in result.json."""
    return {
        **asdict(arm.summary),
        **asdict(arm.engine),
        "computed_prompt_tokens": computed_tokens(arm),
        "replay_s": arm.replay_s,
        "wait_share": arm.wait_share,
        "failures": [asdict(failure) for failure in arm.failures],
        "log_errors": list(arm.log_errors),
        "log": str(arm.log_path),
        # Without the path of this machine's interpreter.
        "command": [Path(arm.command[0]).name, *arm.command[1:]],
    }


def results(done: Rounds) -> tuple[dict[str, Any], list[str]]:
    """The rounds so far as they stand in result.json, and what is wrong in each."""
    rounds = [{name: arm_json(arm) for name, arm in one.items()} for one in done]
    found = [
        f"round {number}: {problem}"
        for number, one in enumerate(done, start=1)
        for problem in problems(list(one.values()))
    ]
    return {"rounds": rounds}, found


def computed_tokens(arm: ArmResult) -> int:
    """Prompt tokens that the engine prefilled: all less those found in a cache."""
    return arm.summary.prompt_tokens - arm.summary.cached_tokens


def savings(plain: ArmResult, ours: ArmResult) -> str:
    """Saved tokens as ttlcache tells them, beside what the two arms measure."""
    told = ours.engine.prefill_tokens_saved
    measured = computed_tokens(plain) - computed_tokens(ours)
    ratio = f" ({told / measured:.2f}x)" if measured > 0 else ""
    return (
        f"{ours.name} prefilled {measured:,} tokens less than {plain.name}; "
        f"it tells {told:,.0f} saved{ratio}"
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


def arms_table(done: Rounds, names: Sequence[str]) -> Table:
    """A column an arm: means over the rounds."""
    engines = [arm.engine for one in done for arm in one.values()]
    outcomes = sorted({outcome for engine in engines for outcome in engine.pins})
    ways = sorted({way for engine in engines for way in engine.tier_bytes})
    measures: dict[str, Callable[[ArmResult], float]] = {
        **_MEASURES,
        **{f"pins {outcome}": partial(_pins, outcome) for outcome in outcomes},
        **{f"MB {way}": partial(_megabytes, way) for way in ways},
    }
    rows = []
    for label, of in measures.items():
        means = (statistics.fmean(of(one[name]) for one in done) for name in names)
        cells = (f"{mean:,.0f}" if mean >= 100 else f"{mean:.3g}" for mean in means)
        rows.append([label, *cells])
    return table("the same programs", ["", *names], rows, left=1 + len(names))


def _pins(outcome: str, arm: ArmResult) -> float:
    return arm.engine.pins.get(outcome, 0)


def _megabytes(way: str, arm: ArmResult) -> float:
    return arm.engine.tier_bytes.get(way, 0) / 1e6


def ratio(done: Rounds, what: str, name: str, base: str) -> Ratio:
    """Of one arm over another, by round; what: one of `COMPARED`."""
    pairs = ((one[name].summary, one[base].summary) for one in done)
    return Ratio(tuple(getattr(a, what) / getattr(b, what) for a, b in pairs))


def lines(done: Rounds, names: Sequence[str]) -> list[str]:
    """Every arm over the first, a line each: the mean ratio and that of each round."""
    base, *others = names
    found = []
    for name in others:
        parts = (
            f"{label} {_told(ratio(done, what, name, base))}"
            for what, label in COMPARED.items()
        )
        found.append(f"{name} over {base}: {', '.join(parts)}")
    return found


def _told(found: Ratio) -> str:
    """The mean ratio, its standard error, and that of each round."""
    if math.isnan(found.standard_error):
        return f"{found.geometric_mean:.2f}x"
    return f"{found} ({', '.join(f'{value:.2f}' for value in found.by_round)})"
