"""`python -m bench overhead --scheduler`: TTLScheduler against plain vLLM, paired.

Two engines in one process take the same steps in turns: `RUNNING` requests run and
`WAITING` wait, no model. Three loads:

seats     every seat is taken, everybody decodes: the queue is not looked at
memory    the pool is full: the head of the queue is refused at every step
turnover  about two turns end at every step, each one's context is decided about and
          pinned or not, and as many programs come; both engines serve the same

A step is `schedule()`, `update_from_output()` and, in `turnover`, `add_request()`.
CPU time; the median of the steps' differences is taken pair by pair, so a busy
machine blurs both sides alike.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from ttlcache_connector.harness import EngineHarness, EngineSpec

RUNNING, WAITING = 256, 1000
MAX_RATIO, MAX_MORE_S = 1.10, 1e-4
_PROMPT, _BLOCK = 512, 16
_HUGE = 100_000  # a prompt that no full pool takes
_LOADS = ("seats", "memory", "turnover")


@dataclass(frozen=True, slots=True)
class Paired:
    """Milliseconds a step. more_ms: median of the paired differences."""

    load: str
    steps: int
    plain_ms: float
    ours_ms: float
    plain_mean_ms: float
    ours_mean_ms: float
    more_ms: float

    @property
    def ratio(self) -> float:
        return self.ours_ms / self.plain_ms

    @property
    def passed(self) -> bool:
        return self.ratio <= MAX_RATIO and self.more_ms <= 1e3 * MAX_MORE_S


class _Engine:
    """One of the two, with its load."""

    def __init__(self, ours: bool, load: str, running: int, waiting: int) -> None:
        self._load = load
        self._turnover = load == "turnover"
        grows = 2 * running * (_PROMPT + 4096) // _BLOCK
        blocks = grows if load != "memory" else running * (_PROMPT + 1024) // _BLOCK
        self.harness = EngineHarness(
            EngineSpec(
                num_blocks=blocks,
                block_tokens=_BLOCK,
                max_num_seqs=running + (0 if load != "memory" else 64),
                max_num_batched_tokens=8192,
                max_model_len=131_072,
                connector=ours,
            )
        )
        self._next = running + waiting
        for index in range(running):
            self._add([index + 1] * _PROMPT, index)
        while len(self.harness.scheduler.running) < running:
            self.harness.step()
        for index in range(running, running + waiting):
            size = _HUGE if load == "memory" and index == running else _PROMPT
            self._add([index + 1] * size, index)
        self.harness.finished.clear()

    def step(self) -> float:
        """CPU seconds of a step; requests are built outside of it."""
        began_s = time.process_time()
        self.harness.step()
        seconds = time.process_time() - began_s
        if not self._turnover:
            return seconds
        for _ in range(len(self.harness.finished)):
            self._next += 1
            prompt = [self._next] * _PROMPT
            began_s = time.process_time()
            self._add(prompt, self._next)
            seconds += time.process_time() - began_s
        self.harness.finished.clear()
        return seconds

    def _add(self, prompt: list[int], index: int) -> None:
        # Staggered lengths: ends are spread evenly over the steps.
        output = 64 + 37 * index % 128 if self._turnover else 4096
        self.harness.add(
            f"p{index:05d}/0",
            prompt,
            max_tokens=output,
            hints={"program_id": f"p{index:05d}", "tool": "bash"},
        )


def run(
    steps: int, console: Console, *, running: int = RUNNING, waiting: int = WAITING
) -> list[Paired]:
    """Measure all loads; engines in turns, a warm-up of a tenth."""
    return [_measure(load, steps, running, waiting) for load in _LOADS]


def _measure(load: str, steps: int, running: int, waiting: int) -> Paired:
    plain = _Engine(False, load, running, waiting)
    ours = _Engine(True, load, running, waiting)
    left, right = _alternate(plain.step, ours.step, steps + steps // 10)
    left, right = left[steps // 10 :], right[steps // 10 :]
    return Paired(
        load,
        steps,
        1e3 * statistics.median(left),
        1e3 * statistics.median(right),
        1e3 * statistics.fmean(left),
        1e3 * statistics.fmean(right),
        1e3 * statistics.median(b - a for a, b in zip(left, right, strict=True)),
    )


def _alternate(
    first: Callable[[], float], second: Callable[[], float], steps: int
) -> tuple[list[float], list[float]]:
    """Who goes first changes from step to step."""
    left, right = [], []
    for step in range(steps):
        if step % 2:
            left.append(first())
            right.append(second())
        else:
            right.append(second())
            left.append(first())
    return left, right


def print_table(results: list[Paired], console: Console) -> bool:
    """All loads with their verdict; whether every bar is met."""
    view = Table(
        title=f"milliseconds a step, {RUNNING} running, {WAITING} waiting",
        box=box.SIMPLE,
    )
    for name in ("load", "vLLM", "TTLScheduler", "ratio", "more", "means", "verdict"):
        view.add_column(name)
    for r in results:
        view.add_row(
            r.load,
            f"{r.plain_ms:.3f}",
            f"{r.ours_ms:.3f}",
            f"{r.ratio:.3f}",
            f"{r.more_ms:.3f}",
            f"{r.plain_mean_ms:.3f} / {r.ours_mean_ms:.3f}",
            "pass" if r.passed else "FAIL",
        )
    console.print(view)
    console.print(f"bars: ratio <= {MAX_RATIO}, more <= {1e3 * MAX_MORE_S:g} ms")
    return all(r.passed for r in results)


def to_json(results: list[Paired]) -> dict[str, Any]:
    """Rows for bench/results."""
    return {
        "name": "overhead",
        "command": "python -m bench overhead --scheduler",
        "running": RUNNING,
        "waiting": WAITING,
        "rows": [
            {
                **{
                    key: round(value, 4) if isinstance(value, float) else value
                    for key, value in asdict(r).items()
                },
                "ratio": round(r.ratio, 4),
            }
            for r in results
        ],
    }
