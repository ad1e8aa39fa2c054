"""A CUDA device made of this process's memory, for unit tests of the engine's order.

Streams are queues of operations. Whenever the engine looks at an event, a seeded
random scheduler runs some operations of any stream whose head may run: all that CUDA
permits may happen, so a missing event shows as wrong bytes. Copies are real; memory
outside live allocations and kernels on unpinned host memory are errors that break the
device for good, as on a real one. It says nothing about speed.
"""

from __future__ import annotations

import bisect
import ctypes
import itertools
import random
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ttlcache.transfer.cuda import KERNELS, RUN_BYTES, RUN_FIELDS, CudaError

Ranges = list[tuple[int, int]]
ALIGNMENT = 256
#: Made-up speeds: bytes a second, seconds a call, seconds a piece of a batch.
LINK_BYTES_PER_S, CALL_S, PIECE_S = 50e9, 3e-6, 1e-7


@dataclass
class _Event:
    recorded: int = 0
    reached: int = 0
    at_s: float = 0.0


@dataclass
class _Op:
    """An operation in a stream; `ready` says whether it may run."""

    run: Callable[[], None]
    ready: Callable[[], bool] = lambda: True


@dataclass
class FakeCuda:
    """`CupyRuntime` in virtual time; `calls` lists every call by name.

    Args:
        seed: of the scheduler.
        fail: call name → the number of that call that fails (1: the next one).
        run_kernel: carries out packed runs given kernel, thread blocks, arguments and
            the memory that kernels reach; default: memmove.
    """

    seed: int = 0
    has_batch_copy: bool = True
    kernels_reach_host: bool = True
    max_pitch_bytes: int = 2**31 - 1
    fail: dict[str, int] = field(default_factory=dict)
    run_kernel: Callable[[str, int, tuple[int, ...], Ranges], object] | None = None

    def __post_init__(self):
        self.calls: list[str] = []
        #: The engine's thread and the test share the device.
        self._lock = threading.RLock()
        self.now_s = 0.0
        self.broken = ""
        self._random = random.Random(self.seed)
        self._handles = itertools.count(1)
        self._streams: dict[int, deque[_Op]] = {}
        self._events: dict[int, _Event] = {}
        self._memory: dict[int, tuple[NDArray[np.uint8], int, str]] = {}
        self._bases: list[int] = []

    # Streams and events

    def activate(self):
        self._called("activate")

    def create_stream(self):
        self._called("create_stream")
        handle = next(self._handles)
        with self._lock:
            self._streams[handle] = deque()
        return handle

    def destroy_stream(self, stream):
        self._called("destroy_stream")
        while self._streams[stream]:
            self.progress(1)
        with self._lock:
            del self._streams[stream]

    def drain(self, stream):
        self._called("drain")
        while self._streams[stream]:
            self.progress(1)
            self._check_broken("drain")

    def create_event(self):
        self._called("create_event")
        handle = next(self._handles)
        self._events[handle] = _Event()
        return handle

    def destroy_event(self, event):
        self._called("destroy_event")
        del self._events[event]  # streams that wait for it hold the object itself

    def record(self, event, stream):
        self._called("record")
        held = self._events[event]
        held.recorded = number = held.recorded + 1

        def reach():
            held.reached, held.at_s = number, self.now_s

        self._streams[stream].append(_Op(reach))

    def stream_wait(self, stream, event):
        self._called("stream_wait")
        held = self._events[event]
        number = held.recorded
        self._streams[stream].append(_Op(lambda: None, lambda: held.reached >= number))

    def wait(self, event):
        self._called("wait")
        while not self.is_reached(event):
            self.progress(1 + self._random.randrange(3))

    def is_reached(self, event):
        self._check_broken("wait")
        held = self._events[event]
        return held.reached == held.recorded

    def elapsed_s(self, first, last):
        self._called("elapsed_s")
        return self._events[last].at_s - self._events[first].at_s

    def enqueue(self, stream, run):
        """The test's own work (a forward pass) on a stream."""
        self._streams[stream].append(_Op(run))

    def progress(self, steps):
        """Run up to so many operations, of streams chosen by chance."""
        for _ in range(steps):
            with self._lock:
                heads = [q for q in self._streams.values() if q and q[0].ready()]
                if not heads:
                    return
                self._random.choice(heads).popleft().run()

    # Copies and kernels

    def copy_2d(self, dst, dst_pitch, src, src_pitch, width, rows, stream):
        self._called("copy_2d")
        pitches = (dst_pitch, src_pitch)
        if rows > 1 and not width <= min(pitches) <= max(pitches):
            raise CudaError(f"copy_2d: pitches {pitches} for width {width}")
        if rows > 1 and max(pitches) > self.max_pitch_bytes:
            raise CudaError(f"copy_2d: pitch {max(pitches)} too large")

        def run():
            self.now_s += CALL_S + width * rows / LINK_BYTES_PER_S
            for row in range(rows):
                self._move(dst + row * dst_pitch, src + row * src_pitch, width)

        self._streams[stream].append(_Op(run))

    def copy_batch(self, dst, src, size, stable_source, stream):
        self._called("copy_batch")
        if not self.has_batch_copy:
            raise CudaError("copy_batch: the driver lacks it")
        # Pieces of a batch have no order among themselves.
        copies = list(zip(dst.tolist(), src.tolist(), size.tolist(), strict=True))
        self._random.shuffle(copies)
        # A stable source may be read at once, before the stream gets there.
        is_early = stable_source and self._random.random() < 0.5
        early = [self._read(src, size) if is_early else b"" for _, src, size in copies]

        def run():
            total = sum(size for _, _, size in copies)
            self.now_s += CALL_S + len(copies) * PIECE_S + total / LINK_BYTES_PER_S
            for (dst, src, size), read in zip(copies, early, strict=True):
                self._move(dst, src, size)
                if not self.broken:
                    ctypes.memmove(dst, read, len(read))

        self._streams[stream].append(_Op(run))

    def launch(self, kernel, ctas, args, stream):
        self._called("launch")
        if kernel not in KERNELS.values() or ctas < 1:
            raise CudaError(f"launch: {kernel} on {ctas} thread blocks")

        def run():
            runs = self._runs(args)
            self.now_s += 2 * CALL_S
            for row in runs:
                for start in (row[0], row[1]):
                    self._demand(start, 1, for_kernel=True)
            if self.run_kernel is not None and not self.broken:
                try:
                    self.run_kernel(kernel, ctas, args, self.kernel_memory)
                except CudaError as fault:
                    self.broken = str(fault)
            elif not self.broken:
                for src, dst, src_pitch, dst_pitch, width, rows, _ in runs:
                    for at in range(rows):
                        self._move(dst + at * dst_pitch, src + at * src_pitch, width)

        self._streams[stream].append(_Op(run))

    def _runs(self, args):
        address, count = args[:2]
        raw = ctypes.string_at(address, count * RUN_BYTES)
        return np.frombuffer(raw, np.uint64).reshape(-1, len(RUN_FIELDS)).tolist()

    def _read(self, src, size):
        self._demand(src, size)
        return b"" if self.broken else ctypes.string_at(src, size)

    def _move(self, dst, src, size):
        self._demand(dst, size)
        self._demand(src, size)
        if not self.broken:
            ctypes.memmove(dst, src, size)

    # Memory

    def alloc_device(self, num_bytes):
        self._called("alloc_device")
        return self._alloc(num_bytes, "device")

    def alloc_host(self, num_bytes):
        self._called("alloc_host")
        return self._alloc(num_bytes, "pinned")

    def alloc_pageable(self, num_bytes):
        """Ordinary host memory: kernels must not touch it."""
        return self._alloc(num_bytes, "pageable")

    def take_over(self, address, num_bytes, kind):
        """Memory that others allocated and keep: `device` or `pageable`."""
        self._memory[address] = (np.zeros(0, np.uint8), num_bytes, kind)
        bisect.insort(self._bases, address)

    def free_device(self, address):
        self._free(address, "device")

    def free_host(self, address):
        self._free(address, "pinned")

    def pin(self, address, num_bytes):
        self._called("pin")
        array, _, kind = self._memory[address]
        if kind != "pageable":
            raise CudaError(f"pin: {kind} memory")
        self._memory[address] = (array, num_bytes, "registered")

    def unpin(self, address):
        self._called("unpin")
        array, size, _ = self._memory[address]
        self._memory[address] = (array, size, "pageable")

    @property
    def live_allocations(self):
        return len(self._memory)

    @property
    def kernel_memory(self):
        """Address and size of all that a kernel may touch."""
        held = self._memory.items()
        return [(at, size) for at, (_, size, kind) in held if kind != "pageable"]

    def _alloc(self, num_bytes, kind):
        array = np.zeros(num_bytes + ALIGNMENT, np.uint8)
        address = -(-array.ctypes.data // ALIGNMENT) * ALIGNMENT
        self._memory[address] = (array, num_bytes, kind)
        bisect.insort(self._bases, address)
        return address

    def _free(self, address, kind):
        if self._memory.pop(address)[2] != kind:
            raise CudaError("freed as another kind of memory")
        self._bases.remove(address)

    def _demand(self, address, size, for_kernel=False):
        place = bisect.bisect(self._bases, address) - 1
        base = self._bases[place] if place >= 0 else 0
        _, held, kind = self._memory.get(base, (None, 0, "no"))
        inside = base <= address and address + size <= base + held
        if not inside or (for_kernel and kind == "pageable"):
            self.broken = f"illegal address {address:#x} in {kind} memory"

    # Faults

    def _called(self, name):
        self.calls.append(name)
        if name not in ("destroy_event", "destroy_stream"):
            self._check_broken(name)
        if name in self.fail:
            self.fail[name] -= 1
            if self.fail[name] == 0:
                del self.fail[name]
                raise CudaError(f"{name}: made to fail")

    def _check_broken(self, name):
        if self.broken:
            raise CudaError(f"{name}: {self.broken}")
