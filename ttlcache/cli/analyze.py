"""`ttlcache analyze DIR`: a recording in numbers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from ttlcache.analysis.summary import Spread, Summary, summarize
from ttlcache.cli.common import (
    JsonPath,
    RecordingPath,
    facts,
    numbers,
    plain,
    read,
    seconds,
    write_json,
)

_MAX_TOOLS = 20


def analyze(place: RecordingPath, json_path: JsonPath = None) -> None:
    """Job completion times, cache hits, waits, pins and tool gaps of a recording."""
    summary = summarize(read(place))
    console = Console()
    console.print(_facts(summary))
    waits = (
        ("job completion", summary.jct),
        ("queue wait", summary.wait),
        ("pin duration", summary.pin),
    )
    console.print(_spreads(None, waits))
    if summary.gaps:
        gaps = list(summary.gaps.items())[:_MAX_TOOLS]
        console.print(_spreads("gaps between turns, by tool", gaps))
    if json_path is not None:
        write_json(json_path, asdict(summary))


def _facts(summary: Summary) -> Table:
    rows = [
        ("programs", f"{summary.programs:,}"),
        ("turns", f"{summary.turns:,}"),
        ("makespan", seconds(summary.makespan_s)),
        ("cache hit ratio", f"{summary.cache_hit_ratio:.1%}"),
        ("prompt tokens", f"{summary.prompt_tokens:,}"),
        ("served from pins, tokens", f"{summary.claimed_tokens:,}"),
        ("of those, plain vLLM would have evicted", f"{summary.saved_tokens:,}"),
        ("prefill saved by that", seconds(summary.saved_s)),
        ("held in vain, block-seconds", f"{summary.wasted_block_s:,.0f}"),
        ("idle memory held, block-seconds", f"{summary.idle_block_s:,.0f}"),
        ("preemptions", f"{summary.preemptions:,}"),
    ]
    rows += [(f"pins {name}", f"{n:,}") for name, n in sorted(summary.outcomes.items())]
    rows += [
        (f"turns by {name}", f"{n:,}") for name, n in sorted(summary.rules.items())
    ]
    return facts("recording", rows)


def _spreads(title: str | None, spreads: Iterable[tuple[str, Spread]]) -> Table:
    columns = ("count", "mean", "p50", "p95", "p99", "min", "max")
    grid = numbers(title, columns)
    for name, spread in spreads:
        spans = (seconds(getattr(spread, column)) for column in columns[1:])
        grid.add_row(plain(name), f"{spread.count:,}", *spans)
    return grid
