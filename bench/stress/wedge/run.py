"""Many seeds in parallel processes; a failing one is printed and can be replayed."""

from __future__ import annotations

import logging
import os
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor

from bench.stress.wedge.outcome import Outcome


def play(seed: int) -> Outcome:
    """Run one schedule in this process."""
    # vLLM is slow to import: only where schedules run.
    from bench.stress.wedge.schedule import Schedule

    schedule = Schedule(seed)
    try:
        return Outcome(seed, schedule.run())
    except Exception:  # noqa: BLE001 - every exception is a finding
        return Outcome(seed, 0, traceback.format_exc(limit=-6))


def play_alone(seed: int) -> Outcome:
    """Run one schedule of what vLLM does by itself."""
    from bench.stress.wedge import alone

    return alone.play_alone(seed)


def play_all(
    first_seed: int,
    count: int,
    processes: int,
    play_one: Callable[[int], Outcome] = play,
) -> Iterator[Outcome]:
    """Outcomes in the order of seeds `first_seed` … `first_seed + count - 1`."""
    seeds = range(first_seed, first_seed + count)
    if processes == 1:
        _quiet()
        yield from map(play_one, seeds)
        return
    with ProcessPoolExecutor(processes, initializer=_quiet) as pool:
        yield from pool.map(play_one, seeds, chunksize=8)


def _quiet() -> None:
    """Thousands of engines start: keep their logs out of this process's output."""
    # Errors, too: every bad block that a worker reports is one. Only in processes
    # of our own: it is never taken back.
    os.environ["VLLM_LOGGING_LEVEL"] = "CRITICAL"
    logging.getLogger("vllm").setLevel(logging.CRITICAL)
