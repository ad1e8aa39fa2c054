"""`python -m bench gaps`: every policy on one trace, against hindsight."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.command import argument, json_object, option, write_json
from bench.gaps.costs import CostSetting
from bench.gaps.replay import Arm, Outcome, replay_gaps
from bench.gaps.scores import Score, best_constant_s, oracle, score
from bench.gaps.traces import RATE, GapProgram, read_gaps
from bench.sim.rivals import ablations, published
from bench.tables import table
from ttlcache.config import TTLCacheConfig

DEFAULT_ARMS = (
    Arm("cachettl", "cachettl"),
    Arm("adaptive", "adaptive"),
    Arm("ski-rental", "ski-rental"),
    *(Arm(policy.name, policy.name) for policy in published.POLICIES),
    Arm("none", "none"),
    Arm("adaptive: no history", "adaptive:no-history"),
)
_HEADINGS = (
    "in time",
    "pinned s/turn",
    "cost s/turn",
    "to constant",
    "to oracle",
    "to oracle s/turn",
)


@dataclass(frozen=True, slots=True)
class GapOptions:
    """Whose gaps, and which policies."""

    traces: list[Path] = argument("Traces, gzip JSON lines.")
    json_path: Path | None = option(None, "Write all numbers to this file.", "--json")
    policy: list[str] | None = option(
        None, 'Only these, as NAME or NAME:{"option": value}.'
    )


@dataclass(frozen=True, slots=True)
class TraceResult:
    """One trace's table. The references come last and see all gaps at once."""

    trace: str
    programs: int
    scores: dict[str, Score]
    best_constant: Score
    oracle: Score


def parse_arm(text: str) -> Arm:
    """`name`, `name:{"option": value}` or `adaptive:ABLATION`.

    Raises:
        ValueError: what follows the colon is neither.
    """
    name, colon, options = text.partition(":")
    if not colon:
        return Arm(name, name)
    if name == "adaptive" and options in ablations.ABLATIONS:
        return Arm(text, text)
    value = json_object(f"{text!r}: what follows the colon", options)
    changes = " ".join(f"{key}={_plain(value[key])}" for key in value)
    return Arm(f"{name} {changes}".strip(), name, value)


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def gaps(options: GapOptions, console: Console) -> None:
    """TTLs of every policy on recorded gaps, against hindsight; past only."""
    arms = tuple(map(parse_arm, options.policy or ())) or DEFAULT_ARMS
    setting = CostSetting()
    results = [run_trace(path, arms, setting) for path in options.traces]
    print_setting(setting, console)
    for result in results:
        console.print(trace_table(result))
    if options.json_path is not None:
        write_json(options.json_path, to_json(results, setting))


def run_trace(path: Path, arms: Sequence[Arm], setting: CostSetting) -> TraceResult:
    """Replay one trace under every arm and both references.

    Raises:
        TraceError: the trace cannot be read.
        ConfigError: an arm's policy or options are unknown.
    """
    name = path.name.removesuffix(".jsonl.gz")
    return compare(name, read_gaps(path), arms, setting)


def compare(
    trace: str,
    programs: Sequence[GapProgram],
    arms: Sequence[Arm],
    setting: CostSetting,
) -> TraceResult:
    """`run_trace` on programs at hand."""
    price, max_ttl_s = setting.price, TTLCacheConfig().max_ttl_s

    def run(arm: Arm) -> list[Outcome]:
        return replay_gaps(programs, setting, arm)

    facts = run(Arm("none", "none"))  # the gaps alone, no matter which arms were asked
    ttl_s = best_constant_s(facts, price, max_ttl_s)
    return TraceResult(
        trace=trace,
        programs=len(programs),
        scores={arm.name: score(run(arm), price) for arm in arms},
        best_constant=replace(
            score(run(Arm("fixed", "fixed", {"ttl_s": ttl_s})), price), ttl_s=ttl_s
        ),
        oracle=score(oracle(facts, price, max_ttl_s), price),
    )


def trace_table(result: TraceResult) -> Table:
    """Policies by cost, the references last."""
    best, ideal = result.best_constant, result.oracle
    ranked = sorted(result.scores.items(), key=lambda item: item[1].cost_s)
    view = table(
        f"{result.trace}: {result.programs} programs, {best.turns:,} turns, "
        f"{best.returns:,} returns",
        ("policy", *_HEADINGS),
        ((name, *_cells(own, best, ideal)) for name, own in ranked),
    )
    view.add_section()
    view.add_row(f"best constant {best.ttl_s:.4g} s", *_cells(best, best, ideal))
    view.add_row("oracle", *_cells(ideal, best, ideal))
    return view


def _cells(own: Score, best: Score, ideal: Score) -> tuple[str, ...]:
    return (
        f"{own.in_time:.3f}",
        f"{own.pinned_s:.3f}",
        f"{own.cost_s:.4f}",
        f"{own.regret_share(best):+.1%}",
        f"{own.regret_share(ideal):+.1%}",
        f"{own.regret_s(ideal):+.4f}",
    )


def print_setting(setting: CostSetting, console: Console) -> None:
    """One line with everything that the numbers depend on."""
    a, b, c = setting.prefill
    console.print(
        f"recovery P(n) = {a:.3g} n + {b:.3g} n^2 + {c:.3g} s, "
        f"T = {setting.queueing_delay_s:g} s, price {setting.price:g}, "
        f"{setting.running_tokens:,} tokens running; arrivals as recorded, else "
        f"{RATE:g}/s Poisson",
        highlight=False,
    )


def to_json(results: Sequence[TraceResult], setting: CostSetting) -> dict[str, Any]:
    """Everything printed."""
    return {
        "setting": asdict(setting),
        "traces": {result.trace: _trace_json(result) for result in results},
    }


def _trace_json(result: TraceResult) -> dict[str, Any]:
    best, ideal = result.best_constant, result.oracle
    references = {"best constant": best, "oracle": ideal}
    return {
        "programs": result.programs,
        "arms": {
            name: {
                **asdict(own),
                "regret_to_constant_s": own.regret_s(best),
                "regret_to_oracle_s": own.regret_s(ideal),
            }
            for name, own in {**result.scores, **references}.items()
        },
    }
