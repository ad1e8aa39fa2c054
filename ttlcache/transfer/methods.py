"""The ways to carry out a plan on a device, and which one when: measured, not guessed.

At start-up each way moves the same small plans; the ranking by piece size and
direction decides afterwards. A kernel takes multiprocessors from the model, so it has
to win by `KERNEL_MARGIN`.
"""

from __future__ import annotations

import bisect
import enum
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ttlcache.transfer.base import Direction
from ttlcache.transfer.cuda_api import CudaRuntime

KERNEL_MARGIN = 1.15
PIECE_BYTES = (2 << 10, 8 << 10, 32 << 10, 128 << 10)
#: Planes of a usual model; 1: all layers of a block adjoin.
ROWS = (1, 32)
SCRATCH_BYTES = 16 << 20
MAX_PIECES = 1024
REPEATS = 3


class Method(enum.Enum):
    """How a plan's copies are issued; the value is the name in logs and results."""

    COPY_2D = "copy-2d"
    """One 2-D copy call a run."""
    BATCH = "batch"
    """One driver call for all pieces."""
    SINGLE = "single"
    """One call a piece: where pitches are too wide and there is nothing else."""
    KERNEL_8 = "kernel-8"
    """A csrc kernel on 8 thread blocks."""
    KERNEL_32 = "kernel-32"
    """A csrc kernel on 32 thread blocks."""

    def runs_on(self, runtime: CudaRuntime) -> bool:
        """Whether the device and its driver have what it takes."""
        if self is Method.BATCH:
            return runtime.has_batch_copy
        return runtime.kernels_reach_host or not self.ctas

    @property
    def ctas(self) -> int:
        """Thread blocks of the kernel; 0: no kernel."""
        return {Method.KERNEL_8: 8, Method.KERNEL_32: 32}.get(self, 0)


@dataclass(frozen=True, slots=True)
class Probe:
    """One measured kind of plan."""

    direction: Direction
    flat: bool
    """One row a run: nothing for a 2-D copy to save."""
    piece_bytes: int


@dataclass(frozen=True)
class Ranking:
    """Seconds per byte by probe and method; fewest first when asked."""

    cost: Mapping[Probe, Mapping[Method, float]]

    def order(
        self, direction: Direction, flat: bool, piece_bytes: float
    ) -> list[Method]:
        """Methods for such pieces, best first, by the nearest size on a log scale."""
        sizes = sorted({p.piece_bytes for p in self.cost})
        middles = [math.sqrt(a * b) for a, b in itertools.pairwise(sizes)]
        size = sizes[bisect.bisect(middles, piece_bytes)]
        costs = self.cost[Probe(direction, flat, size)]
        return sorted(costs, key=lambda m: costs[m] * (KERNEL_MARGIN if m.ctas else 1))


#: Without calibration: the copy engine.
UNMEASURED = (Method.BATCH, Method.COPY_2D)
#: What a calibration compares.
CANDIDATES = (Method.BATCH, Method.COPY_2D, Method.KERNEL_8, Method.KERNEL_32)


def measure(
    run: Callable[[Probe, Method], float], methods: tuple[Method, ...]
) -> Ranking:
    """Time every probe by every method, the best of `REPEATS` each.

    Args:
        run: carries out a probe's plan and gives seconds per byte.
    """
    cost: dict[Probe, dict[Method, float]] = {}
    for direction in Direction:
        for flat in (True, False):
            for piece_bytes in PIECE_BYTES:
                probe = Probe(direction, flat, piece_bytes)
                cost[probe] = {
                    method: min(run(probe, method) for _ in range(REPEATS))
                    for method in methods
                }
    return Ranking(cost)
