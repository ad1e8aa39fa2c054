"""`ttlcache analyze DIR`: a recording in numbers."""

from __future__ import annotations

from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from ttlcache.analysis.summary import Spread, Summary, summarize
from ttlcache.cli.common import (
    JsonPath,
    RecordingPath,
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
    console.print(_spreads(summary))
    if summary.gaps:
        console.print(_gaps(summary))
    if json_path is not None:
        write_json(json_path, asdict(summary))


def _facts(summary: Summary) -> Table:
    grid = Table(title="recording", title_justify="left", box=None)
    grid.add_column("")
    grid.add_column("", justify="right")
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
    for row in rows:
        grid.add_row(*row)
    return grid


def _spreads(summary: Summary) -> Table:
    grid = _spread_table("")
    for name, spread in (
        ("job completion", summary.jct),
        ("queue wait", summary.wait),
        ("pin duration", summary.pin),
    ):
        _add(grid, name, spread)
    return grid


def _gaps(summary: Summary) -> Table:
    grid = _spread_table("gaps between turns, by tool")
    for tool, spread in list(summary.gaps.items())[:_MAX_TOOLS]:
        _add(grid, tool, spread)
    return grid


def _spread_table(title: str) -> Table:
    grid = Table(title=title or None, title_justify="left", box=None)
    grid.add_column("", overflow="ellipsis", no_wrap=True, max_width=24)
    for name in ("count", "mean", "p50", "p95", "p99", "min", "max"):
        grid.add_column(name, justify="right", no_wrap=True)
    return grid


def _add(grid: Table, name: str, spread: Spread) -> None:
    numbers = (spread.mean, spread.p50, spread.p95, spread.p99, spread.min, spread.max)
    grid.add_row(plain(name), f"{spread.count:,}", *map(seconds, numbers))
