"""`bench overhead --recorder`: what recording and counting cost a step.

256 programs run at once; each turn generates 200 tokens, one a step (the median turn
of weka_claude_code has 218), so that about 1.3 turns end and begin at every step. Two
controllers get the same events in lockstep, one bare, one with the recorder writing to
disk and its metrics drained at every step; who goes first alternates. Times are CPU
time of the engine's thread; the recorder's own thread is given beside it.
"""

from __future__ import annotations

import gc
import os
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.micro.overhead_driver import (
    CONTEXT_TOKENS,
    TURN_TOKENS,
    Agent,
    make_controller,
    rss_bytes,
)
from bench.tables import Check, checks_table
from ttlcache.clock import VirtualClock
from ttlcache.controller import Controller
from ttlcache.telemetry.events import EVENTS, Telemetry
from ttlcache.telemetry.metrics import MetricsBuffer
from ttlcache.telemetry.recorder import Recorder
from ttlcache.types import Arrival, Finish

RUNNING = 256
STEPS_A_TURN = 200
STEP_S = 0.025
MAX_STEP_MS = 0.03
MAX_MEMORY_GROWTH = 1.05
_BLOCKS = 20


@dataclass(frozen=True, slots=True)
class RecorderCost:
    """Milliseconds a step and bytes.

    step_ms: median over `_BLOCKS` blocks of the mean difference a step.
    writer_ms: CPU time of the recorder's thread a step, not on the engine's thread.
    rss_bytes: after the first tenth of the events, and at the end.
    """

    steps: int
    events: int
    dropped: int
    bare_ms: float
    step_ms: float
    writer_ms: float
    memory_events: int
    rss_bytes: tuple[int, int]

    @property
    def growth(self) -> float:
        return self.rss_bytes[1] / self.rss_bytes[0]

    @property
    def passed(self) -> bool:
        return self.step_ms <= MAX_STEP_MS and self.growth <= MAX_MEMORY_GROWTH


class _NoMetrics(MetricsBuffer):
    """Counts nothing: the arm that metrics are measured against."""

    def count(self, name: str, label: str = "", by: int = 1) -> None:
        return

    def observe(self, name: str, value: float, label: str = "") -> None:
        return


def measure(steps: int, memory_events: int) -> RecorderCost:
    """Both measurements; memory first, while little else is resident."""
    with tempfile.TemporaryDirectory() as folder:
        rss = _memory(Path(folder) / "memory", memory_events)
        return _steps(Path(folder) / "steps", steps, memory_events, rss)


def _steps(
    folder: Path, steps: int, memory_events: int, rss: tuple[int, int]
) -> RecorderCost:
    clock = VirtualClock()
    bare = make_controller("cachettl", clock, telemetry=Telemetry(_NoMetrics()))
    recorder = Recorder(folder, EVENTS, {}, run="bench")
    recorded = make_controller(
        "cachettl", clock, telemetry=Telemetry(recorder=recorder)
    )
    agents = [Agent(n, "session", CONTEXT_TOKENS) for n in range(RUNNING)]
    for agent in agents:
        _begin((bare, recorded), agent.arrival())
    differences, bare_ns = [], 0
    gc.collect()
    for step in range(steps):
        events = [
            (agent.finish(), agent.arrival())
            for number, agent in enumerate(agents)
            if (number * STEPS_A_TURN // RUNNING - step) % STEPS_A_TURN == 0
        ]
        clock.advance(STEP_S)
        order = (bare, recorded) if step % 2 else (recorded, bare)
        spent = {id(each): _step(each, events) for each in order}
        bare_ns += spent[id(bare)]
        differences.append(spent[id(recorded)] - spent[id(bare)])
    writer_s = time.clock_gettime(time.pthread_getcpuclockid(_ident(recorder)))
    recorder.close()
    size = max(1, steps // _BLOCKS)
    blocks = [
        statistics.fmean(differences[at : at + size]) for at in range(0, steps, size)
    ]
    written = sum(
        path.read_bytes().count(b"\n") - 1 for path in folder.glob("events-bench*")
    )
    return RecorderCost(
        steps=steps,
        events=written,
        dropped=recorder.dropped,
        bare_ms=bare_ns / steps / 1e6,
        step_ms=statistics.median(blocks) / 1e6,
        writer_ms=writer_s / steps * 1e3,
        memory_events=memory_events,
        rss_bytes=rss,
    )


def _begin(controllers: tuple[Controller, ...], arrival: Arrival) -> None:
    for each in controllers:
        each.arrive(arrival)
        each.on_allocated(arrival.request_id, arrival.num_tokens - TURN_TOKENS)
        each.prefilled(arrival.request_id, arrival.num_tokens)


def _step(controller: Controller, events: list[tuple[Finish, Arrival]]) -> int:
    """Nanoseconds of one step's hooks: some turns end, their next ones begin."""
    began_ns = time.thread_time_ns()
    controller.tick()
    for finish, arrival in events:
        controller.finish(finish)
        controller.arrive(arrival)
        controller.on_allocated(arrival.request_id, arrival.num_tokens - TURN_TOKENS)
        controller.prefilled(arrival.request_id, arrival.num_tokens)
    if not controller.telemetry.metrics.is_empty():
        controller.telemetry.metrics.drain()
    return time.thread_time_ns() - began_ns


def _memory(folder: Path, events: int) -> tuple[int, int]:
    """Resident bytes after a tenth of `events` and after all of them."""
    recorder = Recorder(
        folder, EVENTS, {}, run="bench", max_file_bytes=1 << 22, max_files=2
    )
    first = 0
    for number in range(events):
        values = (f"program-{number % 1000}", number, 0.5, 100)
        recorder.put(number * 1e-3, "first_token", values)
        if recorder.pending > 50_000:
            recorder.flush()
        if number == events // 10:
            first = rss_bytes()
    recorder.close()
    return first, rss_bytes()


def _ident(recorder: Recorder) -> int:
    ident = recorder.thread_ident
    assert ident is not None
    return ident


def report(cost: RecorderCost, console: Console) -> bool:
    """Print against the bars; whether both are met."""
    rows = [
        Check(
            f"a step, {RUNNING} running",
            cost.step_ms <= MAX_STEP_MS,
            f"{cost.step_ms:.4f} ms",
            f"{MAX_STEP_MS} ms",
        ),
        Check("the same step without them", None, f"{cost.bare_ms:.4f} ms"),
        Check("the recorder's own thread, a step", None, f"{cost.writer_ms:.4f} ms"),
        Check("events written, dropped", None, f"{cost.events:,}, {cost.dropped:,}"),
        Check(
            f"resident memory over {cost.memory_events:,} events",
            cost.growth <= MAX_MEMORY_GROWTH,
            f"{cost.growth:.3f} x",
            f"{MAX_MEMORY_GROWTH} x",
        ),
    ]
    console.print(checks_table("recorder and metrics", rows))
    return cost.passed


def to_json(cost: RecorderCost) -> dict[str, Any]:
    return {
        **asdict(cost),
        "growth": cost.growth,
        "passed": cost.passed,
        "load": os.getloadavg(),
    }
