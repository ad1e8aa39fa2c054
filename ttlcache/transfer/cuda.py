"""The csrc kernels: their file, their names, and a plan as they read it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ttlcache.errors import TransferError
from ttlcache.transfer.plan import CopyPlan, Direction

SOURCE = "copy_runs.cu"
NVRTC_OPTIONS = ("--std=c++17",)
KERNELS = {Direction.STORE: "ttlcache_gather", Direction.LOAD: "ttlcache_scatter"}
THREADS_PER_CTA = 256
#: A warp's share: 32 lanes x 16 bytes x the eight loads that a lane has under way.
TILE_BYTES = 4096

#: `struct Run` of the source.
RUN_FIELDS = ("src", "dst", "src_pitch", "dst_pitch", "width", "rows", "first_tile")
RUN_BYTES = 8 * len(RUN_FIELDS)


class CudaError(TransferError):
    """A CUDA call failed; the text names call and error."""


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
