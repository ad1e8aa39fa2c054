"""`python -m bench overhead --core`: what ttlcache itself costs, against its bars."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.micro.overhead_driver import machine
from bench.micro.overhead_scale import Chunk, Kept, measure_kept, run_programs
from bench.micro.overhead_turns import (
    OPEN_GAPS,
    DecideResult,
    TurnResult,
    time_decide,
    time_turns,
)
from bench.tables import Check, checks_table, table
from ttlcache import policies
from ttlcache.config import TTLCacheConfig

MAX_DECIDE_US = 100.0
MAX_TURN_US = 60.0
MAX_BYTES_PER_PROGRAM = 1152.0
MAX_LAST_CHUNK = 1.3
"""Time of the last chunk over that of the median one."""
MAX_MEMORY_GROWTH = 1.05
"""Resident memory at the end over that after the second chunk."""
IDENTITIES = ("hint", "session", "prefix")
TURN_POLICIES = ("cachettl", "adaptive")
TURN_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Bar:
    """A number with its limit."""

    name: str
    value: float
    limit: float
    unit: str

    @property
    def passed(self) -> bool:
        return self.value <= self.limit


@dataclass(frozen=True, slots=True)
class OverheadResult:
    """All measurements of the core."""

    decide: list[DecideResult]
    turns: list[TurnResult]
    chunks: list[Chunk]
    kept: list[Kept]
    scale_policy: str


def run(
    num_programs: int, idle_programs: int, repeats: int, console: Console
) -> OverheadResult:
    """Measure everything, printing each table as soon as it is known."""
    scale_policy = TTLCacheConfig().policy
    # First: later parts leave memory behind that would hide its growth.
    chunks = run_programs(
        num_programs,
        scale_policy,
        lambda chunk: console.print(_progress(chunk), highlight=False),
    )
    console.print(_chunk_table(chunks, scale_policy))
    decide = [time_decide(name, repeats) for name in policies.SHIPPED]
    console.print(_decide_table(decide))
    turns = _best_turns(repeats)
    console.print(_turn_table(turns))
    kept = [measure_kept(idle_programs, each, scale_policy) for each in IDENTITIES]
    console.print(_kept_table(kept))
    return OverheadResult(decide, turns, chunks, kept, scale_policy)


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


def bars(result: OverheadResult) -> list[Bar]:
    """The issue's bars with the worst number of each kind."""
    decide = max(result.decide, key=lambda r: max(r.warm.median, r.fresh.median))
    turn = max(result.turns, key=lambda r: r.both.median)
    kept = max(result.kept, key=lambda k: k.bytes_each)
    seconds = [chunk.seconds for chunk in result.chunks]
    rss = [chunk.rss_bytes for chunk in result.chunks]
    return [
        Bar(
            f"decide, median ({decide.policy})",
            max(decide.warm.median, decide.fresh.median),
            MAX_DECIDE_US,
            "us",
        ),
        Bar(
            f"arrive + finish, median ({turn.policy}, by {turn.identity})",
            turn.both.median,
            MAX_TURN_US,
            "us",
        ),
        Bar(
            f"bytes kept per live idle program (by {kept.identity})",
            kept.bytes_each,
            MAX_BYTES_PER_PROGRAM,
            "B",
        ),
        Bar(
            "resident memory, last chunk / second",
            rss[-1] / rss[min(1, len(rss) - 1)],
            MAX_MEMORY_GROWTH,
            "x",
        ),
        Bar(
            "time, last chunk / median",
            seconds[-1] / statistics.median(seconds),
            MAX_LAST_CHUNK,
            "x",
        ),
    ]


def print_bars(result: OverheadResult, console: Console) -> bool:
    """Pass or fail next to each number; whether all passed."""
    found = bars(result)
    rows = [
        Check(
            bar.name,
            bar.passed,
            f"{bar.value:,.4g} {bar.unit}",
            f"{bar.limit:,.4g} {bar.unit}",
        )
        for bar in found
    ]
    console.print(checks_table("bars (the worst number of each kind)", rows))
    return all(bar.passed for bar in found)


def to_json(result: OverheadResult) -> dict[str, Any]:
    """Everything printed, and the machine."""
    return {
        **asdict(result),
        "bars": [{**asdict(bar), "passed": bar.passed} for bar in bars(result)],
        "machine": machine(),
    }


def _decide_table(results: Sequence[DecideResult]) -> Table:
    open_headings = [f"{count:,} open" for count in OPEN_GAPS[1:]]
    return table(
        "decide at 10,000 recorded gaps, microseconds (the slowest of three keys)",
        ("of", "warm", "p99", "fresh", "p99", *open_headings),
        (
            (
                r.policy,
                *(f"{us:.1f}" for m in (r.warm, r.fresh) for us in (m.median, m.p99)),
                *(f"{r.open_gaps[count].median:.1f}" for count in OPEN_GAPS[1:]),
            )
            for r in results
        ),
    )


def _turn_table(results: Sequence[TurnResult]) -> Table:
    columns = ("of", "arrive", "finish", "both", "both p99", "admit", "first arrive")
    rows = []
    for r in results:
        timed = [r.arrive.median, r.finish.median, r.both.median, r.both.p99]
        timed += [r.admit.median, r.first_arrive.median]
        cells = [f"{value:.1f}" for value in timed]
        rows.append([f"{r.policy}, by {r.identity}", *cells, f"{r.pins_claimed:,}"])
    title = "a turn through the controller, 8,192 tokens, microseconds"
    return table(title, (*columns, "claimed"), rows)


def _kept_table(results: Sequence[Kept]) -> Table:
    rows = (
        (
            f"by {kept.identity}",
            f"{kept.programs:,}",
            f"{kept.bytes_each:,.0f}",
            f"{kept.pinned_bytes_each:,.0f}",
        )
        for kept in results
    )
    columns = ("of", "programs", "idle", "pinned")
    return table("bytes kept per live idle program", columns, rows)


def _progress(chunk: Chunk) -> str:
    return f"{chunk.programs:,} programs: {chunk.seconds:.1f} s for this tenth"


def _chunk_table(chunks: Sequence[Chunk], policy: str) -> Table:
    rows, before = [], 0
    for chunk in chunks:
        each_us = chunk.seconds / (chunk.programs - before) * 1e6
        before = chunk.programs
        row = [
            f"{chunk.programs:,}",
            f"{chunk.seconds:.2f}",
            f"{each_us:.1f}",
            f"{chunk.rss_bytes / 1e6:,.1f}",
            f"{chunk.live:,}",
            f"{chunk.open_gaps:,}",
        ]
        rows.append(row)
    columns = (
        "of",
        "CPU s",
        "us a program",
        "resident MB",
        "in the table",
        "open gaps",
    )
    return table(f"programs through one controller ({policy})", columns, rows)
