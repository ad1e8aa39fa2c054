"""`ttlcache explain PROGRAM`: what was decided for each turn, and was it right?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from ttlcache.analysis.explain import Group, Verdict, by_tool, verdicts
from ttlcache.analysis.recording import Interval, ProgramLog, Recording, held_in_vain
from ttlcache.cli.common import facts, fail, numbers, plain, read, seconds


def explain(
    program: Annotated[str, typer.Argument(help="Its id, or the start of it.")],
    place: Annotated[
        Path, typer.Option("--from", help="Folder of the recording (record_path).")
    ] = Path(),
) -> None:
    """Each turn of a program: tool, history, TTL and why, outcome, regret."""
    recording = read(place)
    console = Console()
    log = _find(recording, program, console)
    max_ttl_s = recording.max_ttl_s(log)
    found = verdicts(log, max_ttl_s)
    if log.run in recording.observed_runs:
        console.print("policy observe: all pins and savings are would-be ones")
    for verdict in found:
        _print_turn(verdict, console)
    groups = by_tool(log, max_ttl_s)
    console.print(_sums(log, found, groups[0], recording.wanted(log.run)))
    if groups[0].turns:
        console.print(_groups(groups))


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


def _print_turn(verdict: Verdict, console: Console) -> None:
    turn, decided = verdict.turn, verdict.turn.decided
    gap = "" if turn.gap_s is None else f", {seconds(turn.gap_s)} after the last one"
    console.print(
        f"[bold]turn {verdict.number}[/] by {turn.rule or '?'}{gap}: "
        f"{turn.prompt_tokens:,} prompt tokens, {turn.cached_tokens:,} cached, "
        f"waited {seconds(turn.wait_s)}",
        highlight=False,
    )
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row("  begin", plain(verdict.claim))
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
    grid.add_row("  end", plain(verdict.after))
    if verdict.cost_s is not None:
        grid.add_row(
            "  cost",
            f"{seconds(verdict.cost_s)}; oracle {seconds(verdict.oracle_s)}, "
            f"best constant {seconds(verdict.constant_s)}",
        )
    console.print(grid)


def _sums(
    log: ProgramLog, found: list[Verdict], whole: Group, wanted: list[Interval]
) -> Table:
    pins = [turn.pin for turn in log.turns if turn.pin is not None]
    unclaimed_s = sum(pin.lived_s for pin in pins if pin.outcome != "claimed")
    in_vain_s = sum(e - s for pin in pins for s, e in held_in_vain(pin, wanted))
    rows = (
        ("turns", str(len(found))),
        ("claimed a pin", str(sum(v.claimed for v in found))),
        ("tokens served from pins", f"{sum(t.claimed_tokens for t in log.turns):,}"),
        (
            "of those, plain vLLM would have evicted",
            f"{sum(t.saved_tokens for t in log.turns):,}",
        ),
        ("prefill saved by that", seconds(sum(t.saved_s for t in log.turns))),
        ("held in vain", seconds(in_vain_s)),
        ("held while nobody wanted the memory", seconds(unclaimed_s - in_vain_s)),
        ("regret against the oracle", seconds(whole.cost_s - whole.oracle_s)),
        (
            f"regret against the best constant, {seconds(whole.constant_ttl_s)}",
            seconds(whole.cost_s - whole.constant_s),
        ),
        ("job completion", seconds(log.jct_s)),
        ("ended", log.how or "not yet"),
    )
    return facts(f"program {plain(log.program)}", rows)


def _groups(groups: list[Group]) -> Table:
    title = "cost by tool, beside what hindsight would have paid"
    columns = ("turns", "came\nback", "claimed", "cost", "oracle", "best\nconstant")
    grid = numbers(title, (*columns, "its\nTTL"))
    for group in groups:
        sums = (group.cost_s, group.oracle_s, group.constant_s, group.constant_ttl_s)
        counts = (group.turns, group.returned, group.claimed)
        grid.add_row(plain(group.name), *map(str, counts), *map(seconds, sums))
    return grid
