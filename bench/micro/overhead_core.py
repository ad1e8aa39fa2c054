"""`python -m bench overhead`: what ttlcache itself costs, the core against its bars."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.command import write_json
from bench.micro.overhead_bytes import Kept, measure_kept
from bench.micro.overhead_driver import IDENTITIES, machine
from bench.micro.overhead_turns import TurnResult, time_turns
from bench.tables import Check, at_most, checks_table, table
from ttlcache.cli.command import option
from ttlcache.config import TTLCacheConfig

MAX_TURN_US = 60.0
MAX_BYTES_PER_PROGRAM = 1400.0
TURN_POLICIES = ("cachettl", "adaptive")
TURN_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class OverheadOptions:
    """One of two scopes, and its sizes."""

    core: bool = option(False, "The core alone, without vLLM.", "--core")
    scheduler: bool = option(
        False, "TTLScheduler against plain vLLM, paired.", "--scheduler"
    )
    steps: int = option(600, "Steps of --scheduler.", min=20)
    json_path: Path | None = option(None, "Write all numbers to this file.", "--json")
    idle_programs: int = option(
        50_000, "Live idle programs whose bytes are counted.", min=100
    )
    repeats: int = option(2_000, "Timed calls of each kind.", min=50)

    def __post_init__(self) -> None:
        if self.core + self.scheduler != 1:
            raise ValueError("say --core or --scheduler")


@dataclass(frozen=True, slots=True)
class OverheadResult:
    """All measurements of the core."""

    turns: list[TurnResult]
    kept: list[Kept]


def overhead(options: OverheadOptions, console: Console) -> int:
    """What ttlcache itself costs: microseconds and bytes. Exit status 1: bar missed."""
    if options.scheduler:
        # Here: only this scope needs vLLM.
        from bench.micro import overhead_scheduler

        paired = overhead_scheduler.run(options.steps, console)
        passed = overhead_scheduler.print_table(paired, console)
        found = overhead_scheduler.to_json(paired, options.steps)
    else:
        result = run(options)
        passed = print_bars(result, console)
        found = to_json(result)
    if options.json_path is not None:
        write_json(options.json_path, found)
    return 0 if passed else 1


def run(options: OverheadOptions) -> OverheadResult:
    """Measure everything."""
    policy = TTLCacheConfig().policy
    turns = _best_turns(options.repeats)
    kept = [measure_kept(options.idle_programs, each, policy) for each in IDENTITIES]
    return OverheadResult(turns, kept)


def _best_turns(repeats: int) -> list[TurnResult]:
    """Of each kind the round with the lowest median.

    Other processes only ever add time, and on a shared machine for seconds on end:
    hence rounds over all kinds.
    """
    rounds = [
        [
            time_turns(policy, identity, repeats)
            for policy in TURN_POLICIES
            for identity in IDENTITIES
        ]
        for _ in range(TURN_ROUNDS)
    ]
    return [
        min(kind, key=lambda r: r.both.median) for kind in zip(*rounds, strict=True)
    ]


def bars(result: OverheadResult) -> list[Check]:
    """The worst number of each kind."""
    turn = max(result.turns, key=lambda r: r.both.median)
    kept = max(result.kept, key=lambda k: k.bytes_each)
    turn_name = f"arrive + finish, median ({turn.policy}, by {turn.identity})"
    kept_name = f"bytes kept per live idle program (by {kept.identity})"
    return [
        at_most(turn_name, turn.both.median, MAX_TURN_US, "us"),
        at_most(kept_name, kept.bytes_each, MAX_BYTES_PER_PROGRAM, "B"),
    ]


def print_bars(result: OverheadResult, console: Console) -> bool:
    """All times, and pass or fail next to each bar; whether all passed."""
    console.print(_times_table(result))
    found = bars(result)
    console.print(checks_table("bars (the worst number of each kind)", found))
    return all(bar.ok for bar in found)


def to_json(result: OverheadResult) -> dict[str, Any]:
    """Everything printed, and the machine."""
    return {
        **asdict(result),
        "bars": [asdict(bar) for bar in bars(result)],
        "machine": machine(),
    }


def _times_table(result: OverheadResult) -> Table:
    timed = [
        (f"{what} of a turn, {of.policy} by {of.identity}", micros)
        for of in result.turns
        for what, micros in (("arrival", of.arrive), ("end", of.finish))
    ]
    rows = ((name, f"{of.median:.1f}", f"{of.p99:.1f}") for name, of in timed)
    return table("microseconds", ("of", "median", "p99"), rows)
