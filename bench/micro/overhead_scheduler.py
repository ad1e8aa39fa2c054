"""`python -m bench overhead --scheduler`: TTLScheduler against plain vLLM, paired.

Engines in one process take the same steps, `TURN` at a time: `RUNNING` requests run and
`WAITING` wait, no model. Some are plain vLLM, some have a connector that does nothing,
some are ours: what vLLM itself does for any connector is told apart from what we do.
There are `EACH` of a kind, as two equal engines differ by where in memory they lie.
Turns of a single step would measure the change of engines, too: a real one has a
process of its own, and with it the interpreter's inline caches and the memory caches.

seats     every seat is taken, everybody decodes: the queue is not looked at
memory    seats are left, but no memory: the head of the queue is refused at every step
turnover  about two turns end at every step, each one's context is decided about and
          pinned or not, and as many programs come; all engines serve the same

A step is `schedule()`, `update_from_output()` and, in `turnover`, `add_request()`;
made-up samples and requests are not counted. CPU time; of the engines of a kind the
mean, and of the steps' differences between kinds the median, so a busy machine blurs
all sides alike. The heap is frozen as vLLM's engine core freezes it.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

from rich.console import Console
from vllm.utils.gc_utils import freeze_gc_heap

from bench.tables import table
from ttlcache_sim import idle_connector
from ttlcache_sim.harness import EngineHarness, EngineSpec

RUNNING, WAITING = 256, 1000
EACH = 3
TURN = 10
MAX_RATIO, MAX_MORE_S = 1.10, 1e-4
_PROMPT, _BLOCK = 512, 16
_HUGE = 130_000  # a prompt of more blocks than `memory` has free
_MAX_GROWTH = 448  # tokens that each running request of `memory` may decode
LOADS = ("seats", "memory", "turnover")
#: Whose connector each engine has.
PLAIN, IDLE, OURS = KINDS = ("", idle_connector.NAME, "TTLConnector")


@dataclass(frozen=True, slots=True)
class Paired:
    """Milliseconds a step.

    more_ms, idle_more_ms: median of the paired differences to plain vLLM, of ours and
        of the connector that does nothing.
    same_ms: the largest such median between two single engines of plain vLLM: what
        there is to see where nothing differs. nan with one engine of a kind.
    """

    load: str
    steps: int
    plain_ms: float
    ours_ms: float
    plain_mean_ms: float
    ours_mean_ms: float
    more_ms: float
    idle_ms: float
    idle_more_ms: float
    same_ms: float

    @property
    def ratio(self) -> float:
        return self.ours_ms / self.plain_ms

    @property
    def passed(self) -> bool:
        return self.ratio <= MAX_RATIO and self.more_ms <= 1e3 * MAX_MORE_S


class _Stopwatch:
    """Adds up the CPU seconds of the methods that it was told of."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def take_s(self) -> float:
        """Seconds since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def watch(self, target: Any, name: str) -> None:
        method = getattr(target, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            began_s = time.process_time()
            result = method(*args, **kwargs)
            self._seconds += time.process_time() - began_s
            return result

        setattr(target, name, timed)


class _Engine:
    """One of them, with its load."""

    def __init__(self, connector: str, load: str, running: int, waiting: int) -> None:
        self._turnover = load == "turnover"
        grows = 2 * running * (_PROMPT + 4096) // _BLOCK
        full = running * (_PROMPT + _MAX_GROWTH) // _BLOCK
        blocks = grows if load != "memory" else full
        self.harness = EngineHarness(
            EngineSpec(
                num_blocks=blocks,
                block_tokens=_BLOCK,
                max_num_seqs=running + (0 if load != "memory" else 64),
                max_num_batched_tokens=8192,
                max_model_len=131_072,
                connector=connector != PLAIN,
                kv_connector=connector,
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
        self._watch = _Stopwatch()
        for name in ("schedule", "update_from_output", "add_request"):
            self._watch.watch(self.harness.scheduler, name)

    def step(self) -> float:
        """CPU seconds of a step; samples and requests are made up outside of it."""
        self.harness.step()
        if self._turnover:
            for _ in range(len(self.harness.finished)):
                self._next += 1
                self._add([self._next] * _PROMPT, self._next)
            self.harness.finished.clear()
        return self._watch.take_s()

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
    idle_connector.register()
    return [measure(load, steps, running, waiting) for load in LOADS]


def measure(
    load: str, steps: int, running: int, waiting: int, each: int = EACH
) -> Paired:
    """One load; `idle_connector` is registered. each: engines of a kind."""
    if load == "memory":
        steps = min(steps, _MAX_GROWTH * 9 // 10 - running // 16)
    # All kinds in turns: what is built first lies together in memory.
    engines = [
        _Engine(connector, load, running, waiting)
        for _ in range(each)
        for connector in KINDS
    ]
    warm = steps // 10
    with _frozen_heap():
        seconds = _alternate([engine.step for engine in engines], steps + warm)
    alone = [of_one[warm:] for of_one in seconds]
    by_kind = [alone[kind :: len(KINDS)] for kind in range(len(KINDS))]
    plain, idle, ours = map(_means, by_kind)
    return Paired(
        load,
        steps,
        1e3 * statistics.median(plain),
        1e3 * statistics.median(ours),
        1e3 * statistics.fmean(plain),
        1e3 * statistics.fmean(ours),
        _more_ms(plain, ours),
        1e3 * statistics.median(idle),
        _more_ms(plain, idle),
        _same_ms(by_kind[0]),
    )


def _means(engines: list[list[float]]) -> list[float]:
    """Step by step, over the engines of a kind."""
    return [statistics.fmean(step) for step in zip(*engines, strict=True)]


def _same_ms(engines: list[list[float]]) -> float:
    pairs = combinations(engines, 2)
    return max((abs(_more_ms(a, b)) for a, b in pairs), default=math.nan)


def _more_ms(plain: list[float], other: list[float]) -> float:
    return 1e3 * statistics.median(b - a for a, b in zip(plain, other, strict=True))


@contextmanager
def _frozen_heap() -> Iterator[None]:
    """What stands when serving begins is no business of the garbage collector's."""
    freeze_gc_heap()
    try:
        yield
    finally:
        gc.unfreeze()


def _alternate(engines: list[Callable[[], float]], steps: int) -> list[list[float]]:
    """Seconds of each engine's steps. Who goes first, and after whom, changes."""
    seconds: list[list[float]] = [[] for _ in engines]
    for first, begin in enumerate(range(0, steps, TURN)):
        way = -1 if first % 2 else 1
        for place in range(len(engines)):
            which = (first + way * place) % len(engines)
            for _ in range(min(TURN, steps - begin)):
                seconds[which].append(engines[which]())
    return seconds


def print_table(results: list[Paired], console: Console) -> bool:
    """All loads with their verdict; whether every bar is met."""
    columns = ["load", "vLLM", "any connector", "TTLScheduler", "ratio", "more"]
    columns += ["of it vLLM's", "vLLM to itself", "means", "verdict"]
    rows = (
        (
            r.load,
            *(f"{ms:.3f}" for ms in (r.plain_ms, r.idle_ms, r.ours_ms, r.ratio)),
            *(f"{ms:.3f}" for ms in (r.more_ms, r.idle_more_ms, r.same_ms)),
            f"{r.plain_mean_ms:.3f} / {r.ours_mean_ms:.3f}",
            "pass" if r.passed else "FAIL",
        )
        for r in results
    )
    title = f"milliseconds a step, {RUNNING} running, {WAITING} waiting"
    console.print(table(title, columns, rows, plain=True))
    console.print(f"bars: ratio <= {MAX_RATIO}, more <= {1e3 * MAX_MORE_S:g} ms")
    return all(r.passed for r in results)


def to_json(results: list[Paired], steps: int = 200) -> dict[str, Any]:
    """Rows for bench/results."""
    return {
        "name": "overhead",
        "command": f"python -m bench overhead --scheduler --steps {steps}",
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
