"""Small buffers that carry a kernel's run records to the device."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from dataclasses import dataclass

from ttlcache.transfer.cuda_api import CudaError, CudaRuntime

SMALLEST_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Staging:
    """Pinned host memory and device memory of equal size."""

    host: int
    device: int
    num_bytes: int


class StagingPool:
    """Buffers in powers of two; one serves one plan at a time."""

    def __init__(self, runtime: CudaRuntime) -> None:
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
