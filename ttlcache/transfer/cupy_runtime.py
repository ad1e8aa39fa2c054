"""CUDA through CuPy: the one file of the core that imports it, when asked to."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np

from ttlcache.errors import TransferError
from ttlcache.transfer.cuda import (
    NVRTC_OPTIONS,
    THREADS_PER_CTA,
    CudaError,
    source_path,
)
from ttlcache.transfer.plan import Addresses, Counts

#: Driver interface of cuMemcpyBatchAsync that is asked for: later ones differ.
BATCH_SINCE = 12080
#: CUmemcpySrcAccessOrder: read sources in stream order, or whenever it suits.
ORDER_STREAM, ORDER_ANY = 1, 3
MEMCPY_DEFAULT = 4  # direction from the addresses
NON_BLOCKING = 1  # cudaStreamNonBlocking
BLOCKING_SYNC = 1  # cudaEventBlockingSync
PORTABLE_MAPPED = 3  # cudaHostAllocPortable | cudaHostAllocMapped


BATCH_PROTOTYPE = ctypes.CFUNCTYPE(
    ctypes.c_uint,
    *[ctypes.c_void_p] * 3,  # destinations, sources, sizes
    ctypes.c_size_t,  # how many
    *[ctypes.c_void_p] * 2,  # attributes, and the first copy that each is for
    ctypes.c_size_t,  # how many
    *[ctypes.c_void_p] * 2,  # index of the copy at fault, stream
)


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_uint), ("id", ctypes.c_int)]


class _BatchAttributes(ctypes.Structure):
    """CUmemcpyAttributes."""

    _fields_ = [
        ("src_access_order", ctypes.c_uint),
        ("src_hint", _Location),
        ("dst_hint", _Location),
        ("flags", ctypes.c_uint),
    ]


@dataclass(frozen=True, slots=True)
class _RawStream:
    """A stream's handle in the form that CuPy takes from others."""

    handle: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


class CupyRuntime:
    """The CUDA calls that the engine needs, of one device; handles are raw integers.

    Over CuPy's runtime module and, for batch copies, the driver. `drain` and `wait`
    sleep; the step's path calls neither.
    `tests/transfer/fake_cuda.py` checks the order in which the engine makes the calls.

    Args:
        device: index of the CUDA device.

    max_pitch_bytes: the largest pitch of a 2-D copy. has_batch_copy: whether the driver
    has cuMemcpyBatchAsync (12.8 and later). kernels_reach_host: whether kernels may use
    the host's addresses of registered memory.

    Raises:
        TransferError: CuPy is not installed or sees no such device.
    """

    def __init__(self, device: int = 0) -> None:
        try:
            import cupy
        except ImportError as error:
            raise TransferError(f"cupy is not installed: {error}") from error
        self._cupy = cupy
        self._rt: Any = cupy.cuda.runtime
        self._errors = (
            cupy.cuda.runtime.CUDARuntimeError,
            cupy.cuda.driver.CUDADriverError,
            cupy.cuda.compiler.CompileException,
        )
        try:
            count = self._rt.getDeviceCount()
        except self._errors as error:
            raise TransferError(f"no CUDA device: {error}") from error
        if not 0 <= device < count:
            raise TransferError(f"no CUDA device {device} among {count}")
        self._device = device
        self.activate()
        self.max_pitch_bytes = self._attribute("cudaDevAttrMaxPitch")
        self.kernels_reach_host = bool(
            self._attribute("cudaDevAttrCanUseHostPointerForRegisteredMem")
        )
        self._batch = _batch_entry()
        self.has_batch_copy = self._batch is not None
        self._module: Any = None
        self._kernels: dict[str, Any] = {}

    def _call(self, name: str, *args: object) -> Any:
        try:
            return getattr(self._rt, name)(*args)
        except self._errors as error:
            raise CudaError(f"{name}: {error}") from error

    def _attribute(self, name: str) -> int:
        return int(
            self._call("deviceGetAttribute", getattr(self._rt, name), self._device)
        )

    def activate(self) -> None:
        """Make the device current in the calling thread."""
        self._call("setDevice", self._device)

    def create_stream(self) -> int:
        """One of the lowest priority, not ordered after the default stream."""
        return int(self._call("streamCreateWithFlags", NON_BLOCKING))

    def destroy_stream(self, stream: int) -> None:
        self._call("streamDestroy", stream)

    def drain(self, stream: int) -> None:
        """Sleep until all that was put on it is done. Not for the step's path."""
        self._call("streamSynchronize", stream)

    def create_event(self) -> int:
        """One that keeps the time at which it was reached; `wait` sleeps for it."""
        return int(self._call("eventCreateWithFlags", BLOCKING_SYNC))

    def destroy_event(self, event: int) -> None:
        self._call("eventDestroy", event)

    def record(self, event: int, stream: int) -> None:
        self._call("eventRecord", event, stream)

    def stream_wait(self, stream: int, event: int) -> None:
        """What is put on `stream` from now on waits for the event's last record."""
        self._call("streamWaitEvent", stream, event)

    def wait(self, event: int) -> None:
        """Sleep until it is reached; raises after a failed copy."""
        self._call("eventSynchronize", event)

    def elapsed_s(self, first: int, last: int) -> float:
        """Seconds between two events that were reached."""
        return float(self._call("eventElapsedTime", first, last)) / 1e3

    def copy_2d(
        self,
        dst: int,
        dst_pitch: int,
        src: int,
        src_pitch: int,
        width: int,
        rows: int,
        stream: int,
    ) -> None:
        if rows == 1:
            self._call("memcpyAsync", dst, src, width, MEMCPY_DEFAULT, stream)
            return
        shape = (dst, dst_pitch, src, src_pitch, width, rows)
        self._call("memcpy2DAsync", *shape, MEMCPY_DEFAULT, stream)

    def copy_batch(
        self,
        dst: Addresses,
        src: Addresses,
        size: Counts,
        stable_source: bool,
        stream: int,
    ) -> None:
        """All copies in one call; `stable_source`: nobody writes the sources."""
        if self._batch is None:
            raise CudaError("cuMemcpyBatchAsync: the driver lacks it")
        sizes = np.ascontiguousarray(size, dtype=np.uint64)
        dst, src = np.ascontiguousarray(dst), np.ascontiguousarray(src)
        order = ORDER_ANY if stable_source else ORDER_STREAM
        attributes = _BatchAttributes(src_access_order=order)
        first, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
        status = self._batch(
            dst.ctypes.data,
            src.ctypes.data,
            sizes.ctypes.data,
            len(sizes),
            ctypes.addressof(attributes),
            ctypes.addressof(first),
            1,
            ctypes.addressof(failed),
            stream,
        )
        if status:
            raise CudaError(
                f"cuMemcpyBatchAsync: CUDA error {status} at copy {failed.value} "
                f"of {len(sizes)}"
            )

    def launch(
        self, kernel: str, ctas: int, args: tuple[int, ...], stream: int
    ) -> None:
        """Start a csrc kernel; `args` are 64-bit integers."""
        try:
            function = self._kernels.get(kernel) or self._load(kernel)
            with self._cupy.cuda.Stream.from_external(_RawStream(stream)):
                words = tuple(np.uint64(arg) for arg in args)
                function((ctas,), (THREADS_PER_CTA,), words)
        except self._errors as error:
            raise CudaError(f"kernel {kernel}: {error}") from error

    def _load(self, kernel: str) -> Any:
        """Compiled once for this device; CuPy keeps the result on disk."""
        if self._module is None:
            self._module = self._cupy.RawModule(
                code=source_path().read_text(), options=NVRTC_OPTIONS, backend="nvrtc"
            )
        self._kernels[kernel] = self._module.get_function(kernel)
        return self._kernels[kernel]

    def alloc_device(self, num_bytes: int) -> int:
        return int(self._call("malloc", num_bytes))

    def free_device(self, address: int) -> None:
        self._call("free", address)

    def alloc_host(self, num_bytes: int) -> int:
        """Pinned memory that kernels may address."""
        return int(self._call("hostAlloc", num_bytes, PORTABLE_MAPPED))

    def free_host(self, address: int) -> None:
        self._call("freeHost", address)

    def pin(self, address: int, num_bytes: int) -> None:
        """Register memory of this process with the device."""
        self._call("hostRegister", address, num_bytes, PORTABLE_MAPPED)

    def unpin(self, address: int) -> None:
        self._call("hostUnregister", address)


def _batch_entry() -> Any:
    """cuMemcpyBatchAsync as of `BATCH_SINCE`, or None where the driver is older."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        find = driver.cuGetProcAddress_v2
    except (OSError, AttributeError):
        return None
    entry, found = ctypes.c_void_p(), ctypes.c_int()
    flags = ctypes.c_ulonglong(0)
    status = find(
        b"cuMemcpyBatchAsync",
        ctypes.byref(entry),
        BATCH_SINCE,
        flags,
        ctypes.byref(found),
    )
    if status or not entry.value:
        return None
    return BATCH_PROTOTYPE(entry.value)
