"""Many seeds in parallel processes; a failing one is printed and can be replayed."""

from __future__ import annotations

import logging
import os
import traceback
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from rich.console import Console
from rich.progress import track

from ttlcache.cli.command import option


@dataclass(frozen=True, slots=True)
class WedgeOptions:
    """Which schedules, on whose scheduler."""

    n: int = option(10_000, "How many schedules.", "--n", min=1)
    seed: int = option(0, "Seed of the first one.")
    processes: int = option(2, "Parallel processes.", min=1)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One seed's result; `failure` is None when all held."""

    seed: int
    steps: int
    failure: str | None = None


def wedge(options: WedgeOptions, console: Console) -> int:
    """Random schedules on vLLM's real scheduler: wedges, leaks, broken tables.

    Exits with 1 if any fails, and prints the seeds; one is replayed with
    `--n 1 --seed SEED`.
    """
    n, steps, failed = options.n, 0, []
    outcomes = play_all(options.seed, n, options.processes)
    for outcome in track(outcomes, description="schedules", total=n, console=console):
        steps += outcome.steps
        if outcome.failure is not None:
            failed.append(outcome.seed)
            console.print(f"seed {outcome.seed}:\n{outcome.failure}", markup=False)
    console.print(
        f"{n} schedules, {steps:,} steps, {len(failed)} failed {failed or ''}"
    )
    return 1 if failed else 0


def play(seed: int) -> Outcome:
    """Run one schedule in this process."""
    # vLLM is slow to import: only where schedules run.
    from bench.stress.wedge.schedule import Schedule

    try:
        return Outcome(seed, Schedule(seed).run())
    except Exception:  # noqa: BLE001 - every exception is a finding
        return Outcome(seed, 0, traceback.format_exc(limit=-6))


def play_all(
    first_seed: int,
    count: int,
    processes: int,
) -> Iterator[Outcome]:
    """Outcomes in the order of seeds `first_seed` … `first_seed + count - 1`."""
    seeds = range(first_seed, first_seed + count)
    if processes == 1:
        _quiet()
        yield from map(play, seeds)
        return
    with ProcessPoolExecutor(processes, initializer=_quiet) as pool:
        yield from pool.map(play, seeds, chunksize=8)


def _quiet() -> None:
    """Thousands of engines start: keep their logs out of this process's output."""
    # Errors, too: every bad block that a worker reports is one. Only in processes
    # of our own: it is never taken back.
    os.environ["VLLM_LOGGING_LEVEL"] = "CRITICAL"
    logging.getLogger("vllm").setLevel(logging.CRITICAL)
