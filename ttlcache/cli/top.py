"""`ttlcache top`: programs and pins of a live server."""

from __future__ import annotations

import threading
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from ttlcache.cli.common import (
    DEFAULT_URL,
    ApiKey,
    ServerUrl,
    fail,
    key_headers,
    plain,
    seconds,
)
from ttlcache.cli.live import engines_of, reason
from ttlcache.programs.divergence import REMEDIES, Cause


def top(
    url: ServerUrl = DEFAULT_URL,
    interval_s: Annotated[
        float, typer.Option("--interval", help="Seconds between looks.", min=0.1)
    ] = 1.0,
    rows: Annotated[int, typer.Option(help="Programs shown.", min=1)] = 25,
    once: Annotated[
        bool, typer.Option("--once", help="Print and leave, as without a terminal.")
    ] = False,
    api_key: ApiKey = None,
) -> None:
    """Programs, pins, TTL left, hit rate and pressure, live."""
    console = Console()
    headers = key_headers(api_key)
    try:
        client = httpx.Client(base_url=url, headers=headers, timeout=15.0)
    except httpx.InvalidURL as error:
        fail(f"{url}: {reason(error)}")
    with client as http:
        screen = _screen(_ask(http), rows)
        if once or not console.is_terminal:
            console.print(screen)
            return
        ticks = threading.Event()
        with Live(screen, console=console, screen=True) as live:
            try:
                while not ticks.wait(interval_s):
                    live.update(_screen(_ask(http), rows))
            except KeyboardInterrupt:
                return


def _ask(http: httpx.Client) -> list[dict[str, Any]]:
    try:
        answer = http.get("/ttlcache/programs")
    except httpx.HTTPError as error:
        return fail(f"{http.base_url}: {reason(error)}")
    if answer.status_code == 404:
        return fail(f"{http.base_url} does not run ttlcache (no /ttlcache/programs)")
    if answer.status_code == 401:
        return fail(f"{http.base_url} asks for its key: --api-key, or VLLM_API_KEY")
    if answer.status_code != 200:
        return fail(f"{http.base_url}: status {answer.status_code} {answer.text[:200]}")
    try:
        return engines_of(answer)
    except ValueError as error:
        return fail(error)


def _screen(engines: list[dict[str, Any]], rows: int) -> Group:
    parts: list[Any] = []
    for number, engine in enumerate(engines):
        name = f"engine {number}: " if len(engines) > 1 else ""
        parts.append(name + summary_line(engine))
        parts += divergence_lines(engine)
    programs = [row for engine in engines for row in engine.get("programs", ())]
    parts.append(_table(programs[:rows]))
    return Group(*parts)


def summary_line(engine: dict[str, Any]) -> str:
    """Pool, pins and outcomes of one engine, a line each."""
    gauges, totals = engine.get("gauges", {}), engine.get("totals", {})
    pool = gauges.get("pool_blocks", 0) or 1
    ended = {
        name.removeprefix("pins:"): count
        for name, count in totals.items()
        if name.startswith("pins:")
    }
    claimed = ended.get("claimed", 0)
    went_on = sum(n for k, n in ended.items() if k not in ("ended", "no_return"))
    rate = f"{claimed / went_on:.0%}" if went_on else "-"
    off = "" if gauges.get("retention_enabled", 1) else " RETENTION IS OFF"
    saved = (
        f"  tokens served from pins: {totals.get('claimed_tokens', 0):,}; plain vLLM "
        f"would have evicted about {totals.get('prefill_tokens_saved', 0):,}"
    )
    if engine.get("settings", {}).get("policy") == "observe":
        prefill_s = totals.get("prefill_seconds_savable", 0.0)
        saved = (
            "  policy observe, would-be pins; real ones would have saved up to "
            f"{totals.get('prefill_tokens_savable', 0):,} tokens of prefill, "
            f"{seconds(prefill_s)}"
        )
    return (
        f"{gauges.get('programs_active', 0):.0f} programs, "
        f"{gauges.get('pins_active', 0):.0f} pins on "
        f"{gauges.get('pinned_blocks', 0) / pool:.0%} of {pool:.0f} blocks, "
        f"{gauges.get('free_blocks', 0) / pool:.0%} free{off}\n"
        f"  of pins that ended, claimed: {rate}, last turns left out "
        f"({', '.join(f'{k} {v}' for k, v in sorted(ended.items())) or 'none ended'})\n"
        f"{saved}"
    )


def divergence_lines(engine: dict[str, Any]) -> list[str]:
    """What clients, not memory, took from the prefix cache: one line a cause."""
    totals = engine.get("totals", {})
    found = [(cause, totals.get(f"turns_diverged:{cause}", 0)) for cause in Cause]
    return [
        f"{count:,} turns did not begin with their program's last context ({cause}): "
        f"{REMEDIES[cause]}"
        for cause, count in found
        if count and cause.is_early
    ]


def _table(programs: list[dict[str, Any]]) -> Table:
    """Fits 80 columns: long ids go over two lines, nothing but a tool's name is cut."""
    grid = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    grid.add_column("program", overflow="fold")
    grid.add_column("tool", no_wrap=True, overflow="ellipsis", max_width=14)
    for name in ("turns", "runs", "waits", "gap", "pins", "blocks", "TTL left"):
        grid.add_column(name, justify="right", no_wrap=True, min_width=len(name))
    for row in programs:
        grid.add_row(
            plain(row["program"]),
            plain(row["tool"]),
            str(row["turns"]),
            str(row["running"] or ""),
            str(row["waiting"] or ""),
            seconds(row["gap_s"]),
            str(row["pins"] or ""),
            str(row["pinned_blocks"] or ""),
            seconds(row["ttl_left_s"]),
        )
    return grid
