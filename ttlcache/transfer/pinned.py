"""Which host memory the device may touch."""

from __future__ import annotations

import contextlib

import numpy as np

from ttlcache.transfer.cuda_api import CudaError, CudaRuntime
from ttlcache.transfer.plan import CopyPlan


class PinnedRanges:
    """Disjoint address ranges of pinned host memory.

    Memory is either pinned here (`pin`) or was pinned by its owner (`adopt`, e.g.
    LMCache's shared pool, which LMCache registers in the worker).
    """

    def __init__(self, runtime: CudaRuntime) -> None:
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

    def release(self, address: int) -> None:
        """Forget a range; unregister it if it was pinned here."""
        if self._sizes.pop(address, None) is not None and address in self._ours:
            self._ours.discard(address)
            self._runtime.activate()
            self._runtime.unpin(address)
        self._index()

    def close(self) -> None:
        for address in list(self._sizes):
            with contextlib.suppress(CudaError):
                self.release(address)

    def first_outside(self, plan: CopyPlan) -> int | None:
        """Address of a host piece that is not pinned throughout, or None."""
        if plan.num_copies == 0:
            return None
        first = plan.host
        last = first + ((plan.rows - 1) * plan.host_pitch + plan.width).astype(
            np.uint64
        )
        place = np.searchsorted(self._starts, first, side="right")
        ends = np.concatenate(([np.uint64(0)], self._ends))[place]
        outside = np.flatnonzero(last > ends)
        return int(first[outside[0]]) if len(outside) else None

    def _index(self) -> None:
        ranges = sorted(self._sizes.items())
        self._starts = np.array([start for start, _ in ranges], dtype=np.uint64)
        sizes = np.array([size for _, size in ranges], dtype=np.uint64)
        self._ends = self._starts + sizes
