"""`bench lmcache-store`."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from bench.stress.lmcache_store import Hammer, survive_kills


def lmcache_store(
    operations: Annotated[int, typer.Option(min=0)] = 1_000_000,
    threads: Annotated[int, typer.Option(min=1)] = 8,
    kills: Annotated[int, typer.Option(min=0)] = 50,
    seed: Annotated[int, typer.Option()] = 7,
) -> None:
    """The LMCache plugins' store: mixed operations from threads, then SIGKILLs."""
    problems: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for write_through in (True, False) if operations else ():
            name = f"through-{write_through}"
            hammer = Hammer(Path(folder, name), write_through)
            hammer.run(threads, operations // 2)
            problems += hammer.problems
            typer.echo(
                f"{operations // 2} operations from {threads} threads, "
                f"write_through={write_through}: {hammer.hits} hits, "
                f"{len(hammer.problems)} problems"
            )
        if kills:
            survival = survive_kills(Path(folder, "kills"), kills, seed)
            problems += survival.problems
            typer.echo(
                f"{kills} SIGKILLs: {survival.stored} objects reported stored, "
                f"{survival.found} found, {len(survival.problems)} problems"
            )
    for problem in problems[:10]:
        typer.echo(problem)
    raise typer.Exit(1 if problems else 0)
