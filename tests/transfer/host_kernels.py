"""The csrc kernels as host C++, for tests on machines without a GPU."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

from ttlcache.errors import TransferError
from ttlcache.transfer.cuda import source_path

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
