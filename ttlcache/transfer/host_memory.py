"""Host memory of a CUDA engine: what the device may touch, and buffers of its own."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ttlcache.transfer.cuda import CudaError
from ttlcache.transfer.plan import CopyPlan

if TYPE_CHECKING:
    from ttlcache.transfer.cupy_runtime import CupyRuntime

SMALLEST_BYTES = 4096


class HostRanges:
    """Disjoint address ranges of pinned host memory.

    Memory is either pinned here (`pin`) or was pinned by its owner (`adopt`, e.g.
    LMCache's shared pool, which LMCache registers in the worker).
    """

    def __init__(self, runtime: CupyRuntime) -> None:
        self._runtime = runtime
        self._sizes: dict[int, int] = {}
        self._ours: set[int] = set()
        self._index()

    def pin(self, address: int, num_bytes: int) -> None:
        """Register memory; it must stay mapped until `release` or `close`.

        Raises:
            CudaError: the device refuses it.
        """
        self._runtime.activate()
        self._runtime.pin(address, num_bytes)
        self._ours.add(address)
        self.adopt(address, num_bytes)

    def adopt(self, address: int, num_bytes: int) -> None:
        """Memory that its owner has pinned."""
        self._sizes[address] = num_bytes
        self._index()

    def forget(self, address: int) -> None:
        """Plans that name a range are refused from now on."""
        self._sizes.pop(address, None)
        self._index()

    def release(self, address: int) -> None:
        """Forget a range and unregister it if it was pinned here: no copy names it."""
        self.forget(address)
        if address in self._ours:
            self._ours.discard(address)
            with contextlib.suppress(CudaError):  # the device has lost it already
                self._runtime.activate()
                self._runtime.unpin(address)

    def close(self) -> None:
        for address in {*self._sizes, *self._ours}:
            self.release(address)

    def first_outside(self, plan: CopyPlan) -> int | None:
        """Address of a host piece that is not pinned throughout, or None."""
        if plan.num_copies == 0:
            return None
        first = plan.host
        last = first + ((plan.rows - 1) * plan.host_pitch + plan.width).astype(
            np.uint64
        )
        starts, ends = self._bounds
        place = np.searchsorted(starts, first, side="right")
        ends = np.concatenate(([np.uint64(0)], ends))[place]
        outside = np.flatnonzero(last > ends)
        return int(first[outside[0]]) if len(outside) else None

    def _index(self) -> None:
        ranges = sorted(self._sizes.items())
        starts = np.array([start for start, _ in ranges], dtype=np.uint64)
        sizes = np.array([size for _, size in ranges], dtype=np.uint64)
        # In one piece: engines look from their callers' threads.
        self._bounds = (starts, starts + sizes)


@dataclass(frozen=True, slots=True)
class Staging:
    """Pinned host memory and device memory of equal size: a kernel's run records."""

    host: int
    device: int
    num_bytes: int


class StagingPool:
    """Buffers in powers of two; one serves one plan at a time."""

    def __init__(self, runtime: CupyRuntime) -> None:
        self._runtime = runtime
        self._idle: defaultdict[int, list[Staging]] = defaultdict(list)
        self._all: list[Staging] = []

    def take(self, num_bytes: int) -> Staging:
        """A buffer of at least so many bytes.

        Allocation may wait for the device, so it happens once per size and number
        of plans under way, not per plan.

        Raises:
            CudaError: out of memory.
        """
        size = max(SMALLEST_BYTES, 1 << (num_bytes - 1).bit_length())
        if self._idle[size]:
            return self._idle[size].pop()
        host = self._runtime.alloc_host(size)
        try:
            device = self._runtime.alloc_device(size)
        except CudaError:
            self._runtime.free_host(host)
            raise
        made = Staging(host, device, size)
        self._all.append(made)
        return made

    def give_back(self, staging: Staging) -> None:
        """The plan that used it has landed."""
        self._idle[staging.num_bytes].append(staging)

    def close(self) -> None:
        with contextlib.suppress(CudaError):
            for staging in self._all:
                self._runtime.free_host(staging.host)
                self._runtime.free_device(staging.device)
        self._all.clear()
        self._idle.clear()
