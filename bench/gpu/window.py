"""How many parts a load keeps on its stream: its speed, and what a small copy waits.

Too few, and the link is idle while the engine's thread holds the interpreter; too many,
and the model's own small copies may wait for all of them.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import numpy as np

from bench.gpu.stage import Json
from ttlcache.errors import TransferError
from ttlcache.transfer.cupy_engine import CupyEngine, Method
from ttlcache.transfer.cupy_runtime import CupyRuntime
from ttlcache.transfer.host_memory import HostRanges
from ttlcache.transfer.layout import BlockLayout, Plane
from ttlcache.transfer.plan import Direction, plan_copies
from ttlcache_sim.metrics import percentile

WINDOWS = (3, 8, 32)
#: As the engine does between two launches.
_HOLDS_INTERPRETER_S = 3e-3
_SMALL_BYTES, _STREAM = 4096, 0
_PIECES = 256
#: The first load warms up.
_LOADS, _SMALL_ALONE = 21, 50


def load_beside_small_copies(num_bytes: int, parts: int) -> Json:
    """GB/s of loads, and seconds of small copies beside them; 0 parts: no loads.

    Those of a small copy are the thread's, the wait for the interpreter included.

    Raises:
        TransferError: a load failed.
    """
    runtime = CupyRuntime(0)
    runtime.activate()
    with contextlib.ExitStack() as stack:
        device, host = _both_sides(runtime, num_bytes, stack)
        small = _both_sides(runtime, _SMALL_BYTES, stack)
        event = runtime.create_event()
        stack.callback(runtime.destroy_event, event)
        pinned, piece = HostRanges(runtime), num_bytes // _PIECES
        pinned.adopt(host, num_bytes)
        layout = BlockLayout.from_planes("pool", _PIECES, [Plane(device, piece, piece)])
        backwards = np.arange(_PIECES)[::-1]  # no two adjoin
        plan = plan_copies(Direction.LOAD, layout, backwards, [host], _PIECES)
        engine = CupyEngine(
            runtime, pinned, method=Method.COPY_2D, parts_in_flight=parts or 1
        )
        stack.callback(engine.close)
        waits_s, speeds = [], []
        for number in range(_LOADS if parts else _SMALL_ALONE):
            if parts:
                engine.submit(plan)
            beside_s = list(_small_copies(runtime, engine, *small, event))
            waits_s += beside_s if number else []
            for ended in engine.poll():
                if not ended.ok:
                    raise TransferError(ended.detail)
                speeds.append(num_bytes / ended.seconds / 1e9)
    return {
        "parts": parts,
        "gb_per_s": float(np.median(speeds[1:])) if parts else 0.0,
        "small_copies": len(waits_s),
        "small_copy_p50_s": percentile(waits_s, 50),
        "small_copy_p99_s": percentile(waits_s, 99),
        "small_copy_max_s": max(waits_s),
    }


def _both_sides(
    runtime: CupyRuntime, num_bytes: int, stack: contextlib.ExitStack
) -> tuple[int, int]:
    """Memory of the device, and pinned memory of the host."""
    device = runtime.alloc_device(num_bytes)
    stack.callback(runtime.free_device, device)
    host = runtime.alloc_host(num_bytes)
    stack.callback(runtime.free_host, host)
    return device, host


def _small_copies(
    runtime: CupyRuntime, engine: CupyEngine, device: int, host: int, event: int
) -> Iterator[float]:
    """Seconds of one after the other, until the engine's load has ended."""
    while True:
        begun_s = time.perf_counter()
        sizes = (_SMALL_BYTES, _SMALL_BYTES, 1)
        runtime.copy_2d(device, _SMALL_BYTES, host, *sizes, _STREAM)
        runtime.record(event, _STREAM)
        runtime.wait(event)
        ended_s = time.perf_counter()
        yield ended_s - begun_s
        while time.perf_counter() - ended_s < _HOLDS_INTERPRETER_S:
            pass
        if engine.flush(0.0):
            return
