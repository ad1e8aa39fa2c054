"""The csrc kernels as host C++, for tests on machines without a GPU."""

from __future__ import annotations

import ctypes
import itertools
import shutil
import subprocess
from pathlib import Path

from ttlcache.errors import TransferError
from ttlcache.transfer.base import Failure, Outcome, Ticket, TransferEngine
from ttlcache.transfer.kernels import KERNELS, TILE_BYTES, pack_runs, source_path
from ttlcache.transfer.plan import CopyPlan

COMPILERS = ("g++", "clang++", "c++")


def find_compiler() -> str | None:
    """A C++ compiler of this machine, or None."""
    return next(filter(None, map(shutil.which, COMPILERS)), None)


def build_host_kernels(folder: Path) -> ctypes.CDLL:
    """Compile the kernels into `folder` and load them.

    Raises:
        TransferError: no compiler, or it refuses; with its words.
    """
    compiler, target = find_compiler(), folder / "copy_runs_host.so"
    if compiler is None:
        raise TransferError(f"no C++ compiler: none of {', '.join(COMPILERS)}")
    command = [
        compiler,
        "-std=c++17",
        "-O2",
        "-Wall",
        "-Werror",
        "-fno-strict-aliasing",
    ]
    command += ["-Wno-unknown-pragmas", "-shared", "-fPIC", "-x", "c++"]
    done = subprocess.run(
        [*command, str(source_path()), "-o", str(target)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise TransferError(done.stderr)
    return ctypes.CDLL(str(target))


def run_host_kernel(
    library: ctypes.CDLL,
    plan: CopyPlan,
    num_warps: int = 3,
    tile_bytes: int = TILE_BYTES,
) -> None:
    """Carry out a plan as the device would, warp after warp, lane after lane."""
    runs, num_tiles = pack_runs(plan, tile_bytes)
    args = (runs.ctypes.data, len(runs), num_tiles, tile_bytes)
    call_host_kernel(library, KERNELS[plan.direction], args, num_warps)


def call_host_kernel(
    library: ctypes.CDLL, kernel: str, args: tuple[int, ...], num_warps: int
) -> None:
    """The host build of a kernel with the arguments of a launch.

    Raises:
        TransferError: it would have made accesses that fault on a device.
    """
    function = getattr(library, kernel + "_host")
    function.argtypes = [ctypes.c_void_p, *[ctypes.c_longlong] * 4]
    function.restype = None
    function(*args, num_warps)
    library.ttlcache_misaligned.restype = ctypes.c_longlong
    if library.ttlcache_misaligned():
        raise TransferError(f"{kernel}: misaligned accesses")


class HostKernelEngine(TransferEngine):
    """A transfer engine of nothing but the host build; copies while submitting."""

    name = "csrc-host"

    def __init__(
        self, library: ctypes.CDLL, num_warps: int = 3, tile_bytes: int = TILE_BYTES
    ) -> None:
        self._library = library
        self._shape = (num_warps, tile_bytes)
        self._tickets = itertools.count(1)
        self._ended: list[Outcome] = []
        self._closed = False

    def submit(self, plan: CopyPlan, after: int = 0) -> Ticket:
        ticket, failure = Ticket(next(self._tickets)), self._failure(plan, after)
        num_bytes = plan.num_bytes if failure is None else 0
        if failure is None:
            run_host_kernel(self._library, plan, *self._shape)
        self._ended.append(Outcome(ticket, num_bytes, 0.0, failure))
        return ticket

    def _failure(self, plan: object, after: int) -> Failure | None:
        if self._closed:
            return Failure.CLOSED
        valid = isinstance(plan, CopyPlan) and not after
        return None if valid else Failure.INVALID_PLAN

    def poll(self) -> list[Outcome]:
        ended, self._ended = self._ended, []
        return ended

    def order_after(self, ticket: Ticket, stream: int) -> None:
        """Every copy ended inside `submit`."""

    def flush(self, timeout_s: float) -> bool:
        return True

    def close(self) -> None:
        self._closed = True
