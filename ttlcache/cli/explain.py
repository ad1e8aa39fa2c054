"""`ttlcache explain PROGRAM`: what was decided for each turn, and what became of it?"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from ttlcache.analysis.explain import after_text, claim_text
from ttlcache.analysis.recording import (
    Interval,
    ProgramLog,
    Recording,
    TurnLog,
    held_in_vain,
)
from ttlcache.cli.common import facts, fail, numbers, plain, read, seconds


def explain(
    program: Annotated[str, typer.Argument(help="Its id, or the start of it.")],
    place: Annotated[
        Path, typer.Option("--from", help="Folder of the recording (record_path).")
    ] = Path(),
) -> None:
    """Each turn of a program: tool, history, TTL and why, outcome."""
    recording = read(place)
    console = Console()
    log = _find(recording, program, console)
    if log.run in recording.observed_runs:
        console.print("policy observe: all pins and savings are would-be ones")
    for number in range(len(log.turns)):
        _print_turn(log, number, console)
    console.print(_sums(log, recording.wanted(log.run)))
    console.print(_by_tool(log))


def _find(recording: Recording, program: str, console: Console) -> ProgramLog:
    log = recording.find(program)
    if log is not None:
        jobs = sum(each.program == program for each in recording.programs)
        if jobs > 1:
            console.print(f"the last of {jobs} jobs of this name")
        return log
    near = [log for log in recording.programs if log.program.startswith(program)]
    if len({log.program for log in near}) == 1:
        return near[-1]
    names = ", ".join(log.program for log in (near or recording.programs)[-10:])
    if near:
        return fail(f"several programs begin with {program!r}: e.g. {names}")
    return fail(f"no program {program!r} in this recording; there are e.g. {names}")


def _print_turn(log: ProgramLog, number: int, console: Console) -> None:
    turn, decided = log.turns[number], log.turns[number].decided
    before = next((t for t in log.turns if t.turn == turn.follows), None)
    gap = "" if turn.gap_s is None else f", {seconds(turn.gap_s)} after the last one"
    console.print(
        f"[bold]turn {number + 1}[/] by {turn.rule or '?'}{gap}: "
        f"{turn.prompt_tokens:,} prompt tokens, {turn.cached_tokens:,} cached, "
        f"waited {seconds(turn.wait_s)}",
        highlight=False,
    )
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row("  begin", plain(claim_text(turn, before, first=not number)))
    if turn.divergence is not None:
        grid.add_row("  prefix", plain(str(turn.divergence)))
    if decided is not None:
        inputs = " ".join(f"{k}={v:.4g}" for k, v in decided.inputs.items())
        known = f"{decided.records} gap{'' if decided.records == 1 else 's'} known"
        grid.add_row("  tool", f"{plain(decided.tool)} ({known})")
        ttl = f"{seconds(decided.ttl_s)}: {plain(decided.reason)} ({plain(inputs)})"
        grid.add_row("  TTL", ttl)
        grid.add_row(
            "  pool",
            f"{decided.free_blocks:,} of {decided.pool_blocks:,} blocks free, "
            f"{decided.pinned_blocks:,} pinned; {decided.running} running, "
            f"{decided.waiting} waiting",
        )
    grid.add_row("  end", plain(after_text(turn, log)))
    console.print(grid)


def _sums(log: ProgramLog, wanted: list[Interval]) -> Table:
    pins = [turn.pin for turn in log.turns if turn.pin is not None]
    unclaimed_s = sum(pin.lived_s for pin in pins if pin.outcome != "claimed")
    in_vain_s = sum(e - s for pin in pins for s, e in held_in_vain(pin, wanted))
    rows = (
        ("turns", str(len(log.turns))),
        ("claimed a pin", str(sum(t.claimed_pin is not None for t in log.turns))),
        ("tokens served from pins", f"{sum(t.claimed_tokens for t in log.turns):,}"),
        (
            "of those, plain vLLM would have evicted",
            f"{sum(t.saved_tokens for t in log.turns):,}",
        ),
        ("prefill saved by that", seconds(sum(t.saved_s for t in log.turns))),
        ("held in vain", seconds(in_vain_s)),
        ("held while nobody wanted the memory", seconds(unclaimed_s - in_vain_s)),
        ("job completion", seconds(log.jct_s)),
        ("ended", log.how or "not yet"),
    )
    return facts(f"program {plain(log.program)}", rows)


def _by_tool(log: ProgramLog) -> Table:
    """Of turns that were decided on, by the tool they waited for."""
    tools: dict[str, list[TurnLog]] = defaultdict(list)
    for turn in log.turns:
        if turn.decided is not None:
            tools[turn.decided.tool].append(turn)
    grid = numbers("by tool", ("turns", "pinned", "came back", "found the pin"))
    for tool, turns in sorted(tools.items(), key=lambda item: -len(item[1])):
        counts = (
            len(turns),
            sum(turn.pin is not None for turn in turns),
            sum(turn.next_gap_s is not None for turn in turns),
            sum(turn.next_claimed for turn in turns),
        )
        grid.add_row(plain(tool), *map(str, counts))
    return grid
