"""The CUDA calls that the engine needs, as a protocol, and the csrc kernels.

`cupy_runtime.CupyRuntime` carries the calls out; `tests/transfer/fake_cuda.py` checks
the order in which the engine makes them. There is no stream or device synchronise here:
what the protocol lacks, the step's path cannot do.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ttlcache.errors import TransferError
from ttlcache.transfer.base import Direction
from ttlcache.transfer.plan import Addresses, CopyPlan, Counts

SOURCE = "copy_runs.cu"
NVRTC_OPTIONS = ("--std=c++17",)
KERNELS = {Direction.STORE: "ttlcache_gather", Direction.LOAD: "ttlcache_scatter"}
THREADS_PER_CTA = 256
#: A warp's share: 32 lanes x 16 bytes x the eight loads that a lane has under way.
TILE_BYTES = 4096

#: `struct Run` of the source.
RUN_FIELDS = ("src", "dst", "src_pitch", "dst_pitch", "width", "rows", "first_tile")
RUN_BYTES = 8 * len(RUN_FIELDS)


class CudaError(Exception):
    """A CUDA call failed; the text names call and error."""


class CudaRuntime(Protocol):
    """Streams, events, copies, kernels of one device; handles are raw integers."""

    max_pitch_bytes: int
    """The largest pitch of a 2-D copy (cudaDevAttrMaxPitch)."""
    has_batch_copy: bool
    """Whether the driver has cuMemcpyBatchAsync (12.8 and later)."""
    kernels_reach_host: bool
    """Whether kernels may use the host's addresses of registered memory."""

    def activate(self) -> None:
        """Make the device current in the calling thread."""

    def create_stream(self, low_priority: bool) -> int:
        """A stream that does not order itself after the default stream."""

    def destroy_stream(self, stream: int) -> None: ...

    def create_event(self) -> int:
        """An event that keeps the time at which it was reached."""

    def destroy_event(self, event: int) -> None: ...

    def record(self, event: int, stream: int) -> None: ...

    def stream_wait(self, stream: int, event: int) -> None:
        """What is put on `stream` from now on waits for the event's last record."""

    def is_done(self, event: int) -> bool:
        """Whether the last record was reached; raises after a failed copy."""

    def wait(self, event: int) -> None:
        """Block this thread until then. Not for the step's path."""

    def elapsed_s(self, first: int, last: int) -> float:
        """Seconds between two events that were reached."""

    def copy_2d(
        self,
        dst: int,
        dst_pitch: int,
        src: int,
        src_pitch: int,
        width: int,
        rows: int,
        stream: int,
    ) -> None: ...

    def copy_batch(
        self,
        dst: Addresses,
        src: Addresses,
        size: Counts,
        stable_source: bool,
        stream: int,
    ) -> None:
        """All copies in one call; `stable_source`: nobody writes the sources."""

    def launch(
        self, kernel: str, ctas: int, args: tuple[int, ...], stream: int
    ) -> None:
        """Start a csrc kernel; `args` are 64-bit integers."""

    def alloc_device(self, num_bytes: int) -> int: ...

    def free_device(self, address: int) -> None: ...

    def alloc_host(self, num_bytes: int) -> int:
        """Pinned memory that kernels may address."""

    def free_host(self, address: int) -> None: ...

    def pin(self, address: int, num_bytes: int) -> None:
        """Register memory of this process with the device."""

    def unpin(self, address: int) -> None: ...


def source_path() -> Path:
    """The kernels' file: inside the installed package, or in the repository.

    Raises:
        TransferError: neither has it.
    """
    package = Path(__file__).parents[1]
    for folder in (package / "_csrc", package.parent / "csrc"):
        if (folder / SOURCE).is_file():
            return folder / SOURCE
    raise TransferError(f"{SOURCE} is neither in the package nor beside it")


def pack_runs(
    plan: CopyPlan, tile_bytes: int = TILE_BYTES
) -> tuple[NDArray[np.uint64], int]:
    """A plan as `struct Run` records, shape [num_copies, 7], and its count of tiles."""
    tiles = plan.rows * -(-plan.width // tile_bytes)
    runs = np.empty((plan.num_copies, len(RUN_FIELDS)), dtype=np.uint64)
    for column, name in enumerate(RUN_FIELDS[:-1]):
        runs[:, column] = getattr(plan, name)
    runs[:, -1] = np.cumsum(tiles) - tiles
    return runs, int(tiles.sum())
