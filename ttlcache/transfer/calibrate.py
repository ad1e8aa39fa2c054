"""Which method copies fastest on the device at hand: measured, before the first step.

Each moves the same small plans; the engine chooses by piece size and direction.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict

import numpy as np

from ttlcache.errors import TransferError
from ttlcache.transfer.cupy_engine import CupyEngine, Method, Probe, Ranking
from ttlcache.transfer.cupy_runtime import CupyRuntime
from ttlcache.transfer.host_memory import HostRanges
from ttlcache.transfer.layout import BlockLayout, Plane
from ttlcache.transfer.plan import CopyPlan, Direction, plan_copies

#: The methods compared.
CANDIDATES = (Method.BATCH, Method.COPY_2D, Method.KERNEL)
#: Sizes that layouts have: one layer's part of a block, keys and values apart or not.
PIECE_BYTES = (4 << 10, 16 << 10, 64 << 10, 256 << 10)
#: Planes of a usual model; 1: all layers of a block adjoin.
ROWS = (1, 32)
SCRATCH_BYTES = 16 << 20
MAX_PIECES = 1024
#: The best of so many counts.
REPEATS = 3
FLUSH_S = 30.0


class ProbeFailed(Exception):
    """A method does not work on this device; the text says why."""


def calibrate(runtime: CupyRuntime) -> Ranking:
    """Rank the methods for this device; takes well under a second and 32 MiB.

    A method that fails here is not ranked, the others are.

    Raises:
        CudaError: the device lacks the memory.
        TransferError: every method failed, or one did not end.
    """
    cost: dict[Probe, dict[Method, float]] = defaultdict(dict)
    faults = {}
    with contextlib.ExitStack() as stack:
        runtime.activate()
        device = runtime.alloc_device(SCRATCH_BYTES)
        stack.callback(runtime.free_device, device)
        host = runtime.alloc_host(SCRATCH_BYTES)
        stack.callback(runtime.free_host, host)
        pinned = HostRanges(runtime)
        pinned.adopt(host, SCRATCH_BYTES)
        for method in CANDIDATES:
            if not method.runs_on(runtime):
                continue
            with contextlib.closing(CupyEngine(runtime, pinned, method=method)) as used:
                try:
                    found = _measure(used, device, host)
                except ProbeFailed as error:
                    faults[method.value] = str(error)
                    continue
            for probe, seconds_per_byte in found.items():
                cost[probe][method] = seconds_per_byte
    if not cost:
        raise TransferError(f"no method copies on this device: {faults}")
    return Ranking(cost, faults)


def _measure(engine: CupyEngine, device: int, host: int) -> dict[Probe, float]:
    """Seconds per byte of each kind of plan."""

    def run(probe: Probe) -> float:
        plan = probe_plan(probe, device, host)
        return _seconds(engine, plan) / plan.num_bytes

    # The first launch compiles; nobody should pay for it in a ranking.
    for direction in Direction:
        run(Probe(direction, True, PIECE_BYTES[0]))
    probes = itertools.product(Direction, (True, False), PIECE_BYTES)
    return {
        probe: min(run(probe) for _ in range(REPEATS))
        for probe in itertools.starmap(Probe, probes)
    }


def probe_plan(probe: Probe, device: int, host: int) -> CopyPlan:
    """Every second block of a small pool: nothing merges, as in a worn pool."""
    rows = ROWS[0] if probe.flat else ROWS[1]
    num_pieces = min(MAX_PIECES, SCRATCH_BYTES // (2 * probe.piece_bytes))
    num_blocks = max(1, num_pieces // rows)
    stride = 2 * num_blocks * probe.piece_bytes
    planes = [
        Plane(device + row * stride, probe.piece_bytes, probe.piece_bytes)
        for row in range(rows)
    ]
    layout = BlockLayout.from_planes("probe", 2 * num_blocks, planes)
    ids = np.arange(0, 2 * num_blocks, 2)
    return plan_copies(probe.direction, layout, ids, [host], num_blocks)


def _seconds(engine: CupyEngine, plan: CopyPlan) -> float:
    """Between the plan's two events: issuing included, waiting for `flush` not."""
    engine.submit(plan)
    if not engine.flush(FLUSH_S):
        raise TransferError(f"a probe did not end within {FLUSH_S} s")
    (outcome,) = engine.poll()
    if not outcome.ok:
        raise ProbeFailed(outcome.detail)
    return outcome.seconds
