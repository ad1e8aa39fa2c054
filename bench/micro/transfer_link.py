"""How busy our copy loop keeps a host link: the CPU tier's loop on a simulated one.

The link is a `CupyRuntime` whose copies take their bytes' time on a clock that really
runs, a copy engine each way, and copy nothing. So what is lost is lost by our threads,
by planning and by the interpreter's lock.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import statistics
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

from bench.tables import Check
from ttlcache.telemetry.metrics import MetricsBuffer
from ttlcache.transfer import BlockLayout, Direction
from ttlcache.transfer.cupy_engine import CupyEngine
from ttlcache.transfer.cupy_runtime import CupyRuntime
from ttlcache.transfer.host_memory import HostRanges
from ttlcache.transfer.layout import Plane
from ttlcache_connector.tiers.cpu.messages import BlockCopy
from ttlcache_connector.tiers.cpu.worker import CopyQueue

LINK_BYTES_PER_S = 55e9
#: 64k tokens of an 8B model.
LAYERS, BLOCKS, PAGE_BYTES = 32, 4096, 64 << 10
NUM_BYTES = LAYERS * BLOCKS * PAGE_BYTES
POOL, HOST = 1 << 44, 1 << 45
HELD_S, FREE_S = 3e-3, 5e-3
WAIT_S = 60.0
#: Share of the link, both ways by one, seconds until a load begins.
FREE_BAR, HELD_BAR, BOTH_BAR, BEGIN_BAR_S = 0.92, 0.60, 1.6, 5e-3


@dataclass
class SimulatedLink:
    """What the engine uses of `CupyRuntime`."""

    max_pitch_bytes: int = 1 << 31
    has_batch_copy: bool = True
    kernels_reach_host: bool = False
    first_s: dict[Direction, float] = field(default_factory=dict)
    """When the first bytes of a direction left, and the last arrived."""
    last_s: dict[Direction, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._handles = itertools.count(1)
        self._reached_s: dict[int, float] = {}  # of streams and of events

    def activate(self) -> None:
        pass

    def create_stream(self) -> int:
        handle = next(self._handles)
        self._reached_s[handle] = 0.0
        return handle

    create_event = create_stream

    def destroy_stream(self, stream: int) -> None:
        pass

    destroy_event = destroy_stream

    def record(self, event: int, stream: int) -> None:
        self._reached_s[event] = max(self._reached_s[stream], time.perf_counter())

    def wait(self, event: int) -> None:
        while (left_s := self._reached_s[event] - time.perf_counter()) > 0:
            time.sleep(left_s)

    def elapsed_s(self, first: int, last: int) -> float:
        return self._reached_s[last] - self._reached_s[first]

    def copy_batch(
        self, dst: Any, src: Any, size: Any, stable_source: bool, stream: int
    ) -> None:
        way = Direction.LOAD if stable_source else Direction.STORE
        begin_s = max(time.perf_counter(), self._reached_s[stream])
        end_s = begin_s + int(size.sum()) / LINK_BYTES_PER_S
        self.first_s.setdefault(way, begin_s)
        self.last_s[way] = self._reached_s[stream] = end_s


def layout_of(name: str) -> BlockLayout:
    """The example's KV tensors: a block in one piece, or in a piece a layer."""
    block, layer = LAYERS * PAGE_BYTES, 2 * BLOCKS * PAGE_BYTES
    planes = [
        Plane(POOL + at * PAGE_BYTES, block, PAGE_BYTES)
        if name == "BLNHC"
        else Plane(POOL + at * layer, PAGE_BYTES, PAGE_BYTES)
        for at in range(LAYERS)
    ]
    return BlockLayout.from_planes(name, 2 * BLOCKS, planes)


@dataclass(frozen=True, slots=True)
class Transfer:
    """One way or both ways at once."""

    busy: float
    """Share of one direction's bytes that the link could have moved in the time."""
    submit_s: float
    """On the forward thread."""
    load_begins_s: float


def transfer(layout: BlockLayout, *ways: Direction) -> Transfer:
    """Every second block of a pool, as the CPU tier of a worker moves it."""
    link = SimulatedLink()
    runtime = cast(CupyRuntime, link)
    pinned = HostRanges(runtime)
    pinned.adopt(HOST, NUM_BYTES)
    host = SimpleNamespace(data_ptr=lambda: HOST, stride=lambda _: NUM_BYTES // BLOCKS)
    blocks = BlockCopy(list(range(0, 2 * BLOCKS, 2)), list(range(BLOCKS)))
    queues = [
        CopyQueue(way, CupyEngine(runtime, pinned), MetricsBuffer()) for way in ways
    ]
    asked_s = began_s = time.perf_counter()
    for queue in queues:
        asked_s = time.perf_counter()
        queue.submit("turn", blocks, layout, cast(Any, host), None)
    submit_s = time.perf_counter() - asked_s
    for queue in queues:
        assert queue.engine.flush(WAIT_S)
        ((_, seconds),) = queue.poll()
        assert seconds is not None
        queue.engine.close()
    took_s = max(link.last_s.values()) - began_s
    busy = len(ways) * NUM_BYTES / LINK_BYTES_PER_S / took_s
    return Transfer(busy, submit_s, link.first_s[ways[-1]] - asked_s)


@contextlib.contextmanager
def interpreter_held() -> Iterator[None]:
    """Another thread keeps the interpreter's lock for `HELD_S`, then leaves it."""
    stop = threading.Event()

    def hold() -> None:
        while not stop.is_set():
            until_s = time.perf_counter() + HELD_S
            while time.perf_counter() < until_s:
                pass
            time.sleep(FREE_S)

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def measure(rounds: int) -> tuple[list[Check], dict[str, Any]]:
    """The bars by their medians, and every figure."""
    found: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        found.setdefault(name, []).append(value)

    store, load = Direction.STORE, Direction.LOAD
    for _, name in itertools.product(range(rounds), ("BLNHC", "LBNHC")):
        layout = layout_of(name)
        one = transfer(layout, load)
        note(f"{name} busy", one.busy)
        note(f"{name} submit ms", one.submit_s * 1e3)
        with interpreter_held():
            note(f"{name} busy, interpreter held", transfer(layout, load).busy)
        both = transfer(layout, store, load)
        note(f"{name} both by one", both.busy / one.busy)
        note(f"{name} load begins ms", both.load_begins_s * 1e3)
    medians = {name: statistics.median(values) for name, values in found.items()}
    limits = {
        "busy": (operator.ge, FREE_BAR),
        "busy, interpreter held": (operator.ge, HELD_BAR),
        "both by one": (operator.ge, BOTH_BAR),
        "load begins ms": (operator.le, BEGIN_BAR_S * 1e3),
    }
    checks = []
    for name, value in medians.items():
        holds, limit = limits.get(name.partition(" ")[2], (None, 0.0))
        if holds is None:
            checks.append(Check(name, None, f"{value:.2f}"))
        else:
            sign = ">=" if holds is operator.ge else "<="
            allowed = f"{sign} {limit}"
            checks.append(Check(name, holds(value, limit), f"{value:.2f}", allowed))
    return checks, {"rounds": rounds, "bytes": NUM_BYTES, "found": found}
