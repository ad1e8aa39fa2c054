"""`python -m bench wedge`."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track

from bench.stress.wedge.run import play, play_all, play_alone


def wedge(
    n: Annotated[int, typer.Option("--n", help="How many schedules.", min=1)] = 10_000,
    seed: Annotated[int, typer.Option(help="Seed of the first one.")] = 0,
    processes: Annotated[int, typer.Option(help="Parallel processes.", min=1)] = 2,
    vllm_alone: Annotated[
        bool,
        typer.Option(
            "--vllm-alone",
            help="What is left out otherwise, without us: loads into hybrid caches.",
        ),
    ] = False,
) -> None:
    """Random schedules on vLLM's real scheduler: wedges, leaks, broken tables.

    Exits with 1 if any fails, and prints the seeds; one is replayed with
    `--n 1 --seed SEED`.
    """
    console = Console()
    steps, failed = 0, []
    outcomes = play_all(seed, n, processes, play_alone if vllm_alone else play)
    for outcome in track(outcomes, description="schedules", total=n, console=console):
        steps += outcome.steps
        if outcome.failure is not None:
            failed.append(outcome.seed)
            console.print(f"seed {outcome.seed}:\n{outcome.failure}", markup=False)
    console.print(
        f"{n} schedules, {steps:,} steps, {len(failed)} failed {failed or ''}"
    )
    raise typer.Exit(1 if failed else 0)
