"""What a load keeps on its stream: its speed, and what a small copy waits.

Too little, and the link is idle while the engine's thread holds the interpreter; too
much, and the model's own small copies may wait for all of it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from unittest import mock

import numpy as np

from bench.gpu.stage import Json
from ttlcache.errors import TransferError
from ttlcache.transfer import cupy_engine
from ttlcache.transfer.cupy_runtime import CupyRuntime
from ttlcache.transfer.host_memory import HostRanges
from ttlcache.transfer.layout import BlockLayout, Plane
from ttlcache.transfer.plan import Direction, plan_copies
from ttlcache_sim.metrics import percentile

#: Parts on the stream, and MiB of one; 0 parts: no loads.
WINDOWS = ((0, 16), (3, 16), (8, 16), (32, 16), (3, 4), (12, 4), (1, 64), (3, 64))
#: In each step a thread holds the interpreter, and then leaves it.
_HELD_S, _FREE_S = 3e-3, 5e-3
_SMALL_BYTES, _STREAM = 4096, 0
_PIECES = 256
#: The first load warms up.
_LOADS, _SMALL_ALONE = 61, 200


def load_beside_small_copies(num_bytes: int, parts: int, part_mib: int) -> Json:
    """GB/s of loads, and seconds of a small copy beside them in each step.

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
        stack.enter_context(
            mock.patch.object(cupy_engine, "PART_BYTES", part_mib << 20)
        )
        engine = cupy_engine.CupyEngine(runtime, pinned, parts_in_flight=parts or 1)
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
        "part_mib": part_mib,
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
    runtime: CupyRuntime,
    engine: cupy_engine.CupyEngine,
    device: int,
    host: int,
    event: int,
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
        while time.perf_counter() - ended_s < _HELD_S:
            pass
        time.sleep(_FREE_S)
        if engine.flush(0.0):
            return
