"""How many parts a load keeps on its stream: its speed, and what a small copy waits.

Too few, and the link is idle while the engine's thread holds the interpreter; too many,
and the model's own small copies may wait for all of them.
"""

from __future__ import annotations

import contextlib
import time

import numpy as np

from bench.gpu.stage import Json
from ttlcache.transfer.base import Outcome
from ttlcache.transfer.cupy_engine import CupyEngine, Method
from ttlcache.transfer.cupy_runtime import CupyRuntime
from ttlcache.transfer.host_memory import PinnedRanges
from ttlcache.transfer.layout import BlockLayout, Plane
from ttlcache.transfer.plan import Direction, plan_copies
from ttlcache_sim.metrics import percentile

WINDOWS = (3, 8, 32)
#: As the engine does between two launches.
_HOLDS_INTERPRETER_S = 3e-3
_SMALL_BYTES, _STREAM = 4096, 0
_PIECES = 256
_LOADS, _SMALL_ALONE = 5, 50


def load_beside_small_copies(num_bytes: int, parts: int) -> Json:
    """GB/s of loads, and seconds of small copies beside them; 0 parts: no loads."""
    runtime = CupyRuntime(0)
    runtime.activate()
    device, host = runtime.alloc_device(num_bytes), runtime.alloc_host(num_bytes)
    small = runtime.alloc_device(_SMALL_BYTES), runtime.alloc_host(_SMALL_BYTES)
    pinned, piece = PinnedRanges(runtime), num_bytes // _PIECES
    pinned.adopt(host, num_bytes)
    layout = BlockLayout.from_planes("pool", _PIECES, [Plane(device, piece, piece)])
    backwards = np.arange(_PIECES)[::-1]  # no two adjoin
    plan = plan_copies(Direction.LOAD, layout, backwards, [host], _PIECES)
    waits_s, speeds, event = [], [], runtime.create_event()
    engine = CupyEngine(
        runtime, pinned, method=Method.COPY_2D, parts_in_flight=parts or 1
    )
    with contextlib.closing(engine):
        for _ in range(_LOADS if parts else _SMALL_ALONE):
            if parts:
                engine.submit(plan)
            ended: list[Outcome | None] = []
            while not ended:
                begun_s = time.perf_counter()
                (to, start), size = small, _SMALL_BYTES
                runtime.copy_2d(to, size, start, size, size, 1, _STREAM)
                runtime.record(event, _STREAM)
                runtime.wait(event)
                waits_s.append(time.perf_counter() - begun_s)
                while time.perf_counter() - begun_s < _HOLDS_INTERPRETER_S:
                    pass
                ended = [*engine.poll()] if parts else [None]
            speeds += [num_bytes / each.seconds / 1e9 for each in ended if each]
    runtime.destroy_event(event)
    for on_device, on_host in ((device, host), small):
        runtime.free_device(on_device)
        runtime.free_host(on_host)
    return {
        "parts": parts,
        "gb_per_s": float(np.median(speeds)) if speeds else 0.0,
        "small_copy_p50_s": percentile(waits_s, 50),
        "small_copy_p99_s": percentile(waits_s, 99),
    }
