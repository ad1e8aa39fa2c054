"""`ttlcache explain PROGRAM`: what was decided for each turn, and was it right?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ttlcache.cli.common import fail, read, seconds
from ttlcache.explain import Verdict, verdicts
from ttlcache.recording import ProgramLog, Recording


def explain(
    program: Annotated[str, typer.Argument(help="Its id, or the start of it.")],
    place: Annotated[
        Path, typer.Option("--from", help="Folder of the recording (record_path).")
    ] = Path(),
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object a turn.")
    ] = False,
) -> None:
    """Each turn of a program: tool, history, TTL and why, outcome, regret."""
    recording = read(place)
    log = _find(recording, program)
    found = verdicts(log)
    console = Console()
    if as_json:
        for verdict in found:
            console.print_json(json.dumps(_plain(verdict)), indent=None)
        return
    for verdict in found:
        _print_turn(verdict, console)
    console.print(_sums(log, found))


def _find(recording: Recording, program: str) -> ProgramLog:
    log = recording.find(program)
    if log is not None:
        return log
    near = [log for log in recording.programs if log.program.startswith(program)]
    if len({log.program for log in near}) == 1:
        return near[-1]
    names = ", ".join(log.program for log in (near or recording.programs)[-10:])
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
    console.print(f"  begin   {escape(verdict.claim)}", highlight=False)
    if decided is not None:
        inputs = " ".join(f"{k}={v:.4g}" for k, v in decided.inputs.items())
        console.print(
            f"  tool    {escape(decided.tool)} ({decided.records} gaps of it known)\n"
            f"  decided {seconds(decided.ttl_s)} because {escape(decided.reason)} "
            f"({escape(inputs)})\n"
            f"  pool    {decided.free_blocks:,} of {decided.pool_blocks:,} blocks "
            f"free, {decided.pinned_blocks:,} pinned; {decided.running} running, "
            f"{decided.waiting} waiting",
            highlight=False,
            soft_wrap=True,
        )
    console.print(f"  end     {escape(verdict.after)}", highlight=False)
    if verdict.cost_s is not None and turn.decided is not None:
        console.print(
            f"  cost    {seconds(verdict.cost_s)}; oracle {seconds(verdict.oracle_s)}, "
            f"constant {seconds(verdict.constant_s)}",
            highlight=False,
        )


def _sums(log: ProgramLog, found: list[Verdict]) -> Table:
    costs = [v for v in found if v.cost_s is not None]
    cost_s = sum(v.cost_s or 0.0 for v in costs)
    oracle_s = sum(v.oracle_s or 0.0 for v in costs)
    constant_s = sum(v.constant_s or 0.0 for v in costs)
    grid = Table(title=f"program {escape(log.program)}", title_justify="left", box=None)
    grid.add_column("")
    grid.add_column("", justify="right")
    in_vain = [
        v.turn.pin.lived_s
        for v in found
        if v.turn.pin is not None and v.turn.pin.outcome not in (None, "claimed")
    ]
    for name, value in (
        ("turns", str(len(found))),
        ("claimed a pin", str(sum(v.claimed for v in found))),
        ("prefill saved", seconds(sum(v.turn.saved_s for v in found))),
        ("held in vain", seconds(sum(in_vain))),
        ("regret against the oracle", seconds(cost_s - oracle_s)),
        ("regret against the constant", seconds(cost_s - constant_s)),
        ("job completion", seconds(log.jct_s)),
        ("ended", log.how or "not yet"),
    ):
        grid.add_row(name, value)
    return grid


def _plain(verdict: Verdict) -> dict[str, object]:
    turn, decided = verdict.turn, verdict.turn.decided
    return {
        "turn": verdict.number,
        "rule": turn.rule,
        "relation": turn.relation,
        "gap_s": turn.gap_s,
        "wait_s": turn.wait_s,
        "prompt_tokens": turn.prompt_tokens,
        "cached_tokens": turn.cached_tokens,
        "claimed": verdict.claimed,
        "claim": verdict.claim,
        "saved_s": turn.saved_s,
        "tool": decided.tool if decided else None,
        "ttl_s": decided.ttl_s if decided else None,
        "reason": decided.reason if decided else None,
        "inputs": decided.inputs if decided else {},
        "after": verdict.after,
        "cost_s": verdict.cost_s,
        "oracle_s": verdict.oracle_s,
        "constant_s": verdict.constant_s,
    }
