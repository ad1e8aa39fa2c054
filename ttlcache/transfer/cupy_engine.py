"""Copies between device and pinned host memory, beside the forward pass.

A thread cuts each plan into parts and keeps a few of them on a stream of its own, so
that the link stays busy while Python is. Order comes from events only: a plan waits for
the event that the caller hands over, the thread sleeps until a part's event is reached.
Nothing here synchronises a stream or the device.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import enum
import itertools
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from ttlcache.transfer.base import PART_BYTES, Failure, Job, TransferEngine
from ttlcache.transfer.cuda import KERNELS, TILE_BYTES, CudaError, pack_runs
from ttlcache.transfer.cupy_runtime import CupyRuntime
from ttlcache.transfer.host_memory import HostRanges, Staging, StagingPool
from ttlcache.transfer.plan import CopyPlan, Direction

WARPS_PER_CTA = 8
#: Of a kernel; on an H200 32 copied 3 % more at most.
MAX_CTAS = 8
#: On the stream at once: one is copied, one waits for its turn, and one covers the time
#: in which the thread waits for the interpreter.
PARTS_IN_FLIGHT = 3
#: What a method has to win by: a kernel takes multiprocessors from the model, and one
#: call a piece waits for the interpreter as often (3 ms beside a busy thread, H200).
MARGIN = 1.15


class Method(enum.Enum):
    """How a plan's copies are issued; the value is the name in logs and results."""

    COPY_2D = "copy-2d"
    """One 2-D copy call a run."""
    BATCH = "batch"
    """One driver call for all pieces."""
    SINGLE = "single"
    """One call a piece: where pitches are too wide and there is nothing else."""
    KERNEL = "kernel"
    """A csrc kernel: one way the fastest for pieces of 16 KiB that lie apart."""

    def runs_on(self, runtime: CupyRuntime) -> bool:
        """Whether the device and its driver have what it takes."""
        if self is Method.BATCH:
            return runtime.has_batch_copy
        return runtime.kernels_reach_host or self is not Method.KERNEL


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
    faults: Mapping[str, str] = field(default_factory=dict)
    """Why a method is not ranked, by its name."""

    def order(
        self, direction: Direction, flat: bool, piece_bytes: float
    ) -> list[Method]:
        """Methods for such pieces, best first, by the nearest size on a log scale."""
        sizes = sorted({p.piece_bytes for p in self.cost})
        middles = [math.sqrt(a * b) for a, b in itertools.pairwise(sizes)]
        size = sizes[bisect.bisect(middles, piece_bytes)]
        costs = self.cost[Probe(direction, flat, size)]
        slowed = {Method.KERNEL, Method.COPY_2D} if flat else {Method.KERNEL}
        return sorted(costs, key=lambda m: costs[m] * (MARGIN if m in slowed else 1.0))


#: Without calibration: the copy engine.
UNMEASURED = (Method.BATCH, Method.COPY_2D)


@dataclass(slots=True)
class _Part:
    """Copies on the stream, done when the event is reached."""

    job: Job
    begun: int
    done: int
    staging: Staging | None = None
    is_last: bool = False
    """The job ends with it."""


class CupyEngine(TransferEngine):
    """Runs plans on a CUDA device.

    Args:
        runtime: the device; `CupyRuntime()` for a real one.
        pinned: host memory that plans may name; the caller adds to it and closes it.
        ranking: of the methods, from `calibrate`; None: copy engine first.
        method: always this one (benches and tests).
        parts_in_flight: most parts on the stream.

    Raises:
        CudaError: the device gives no stream.
    """

    name = "cupy"

    def __init__(
        self,
        runtime: CupyRuntime,
        pinned: HostRanges,
        ranking: Ranking | None = None,
        method: Method | None = None,
        parts_in_flight: int = PARTS_IN_FLIGHT,
    ) -> None:
        self._runtime = runtime
        self._parts_in_flight = parts_in_flight
        self._pinned = pinned
        self._ranking = ranking
        self._method = method
        self._in_flight: deque[_Part] = deque()
        self._idle_events: list[int] = []
        self._staging = StagingPool(runtime)
        runtime.activate()
        self._stream = runtime.create_stream()
        super().__init__()

    def _check(self, job: Job) -> None:
        # A kernel that touches unpinned memory kills the process's CUDA context.
        outside = self._pinned.first_outside(job.plan)
        if outside is not None:
            text = f"host memory at {outside:#x} was never pinned"
            job.fail(Failure.NOT_PINNED, text)

    @property
    def _is_copying(self) -> bool:
        return bool(self._in_flight)

    def _run(self, job: Job) -> None:
        """Put all parts on the stream, or those before one that fails."""
        self._runtime.activate()
        method, begun = self._choose(job.plan), self._event()
        parts = job.plan.parts(PART_BYTES)
        plan: CopyPlan | None = next(parts)
        is_first = True
        while plan is not None:
            while len(self._in_flight) >= self._parts_in_flight:
                self._land()
            part = _Part(job, begun, self._event())
            try:
                if is_first:
                    is_first = False
                    if job.after:
                        self._runtime.stream_wait(self._stream, job.after)
                    self._runtime.record(begun, self._stream)
                if job.is_wanted():
                    self._issue(part, plan, method)
                else:
                    job.fail(Failure.CANCELLED, "not wanted any more")
            except Exception as error:  # noqa: BLE001 - every plan has an outcome
                job.fail(Failure.DEVICE_ERROR, str(error) or repr(error))
            # Also after a fault: copies issued before it may still be under way, and
            # the plan's memory is theirs until this event is reached.
            self._runtime.record(part.done, self._stream)
            plan = next(parts, None) if job.failure is None else None
            part.is_last = plan is None
            self._in_flight.append(part)

    def _land(self) -> None:
        part = self._in_flight[0]
        self._runtime.wait(part.done)
        self._in_flight.popleft()
        self._idle_events.append(part.done)
        if part.staging is not None:
            self._staging.give_back(part.staging)
        if part.is_last:
            seconds = 0.0
            if part.job.failure is None:
                seconds = self._runtime.elapsed_s(part.begun, part.done)
            self._idle_events.append(part.begun)
            self._end(part.job, seconds)

    def _stop(self) -> None:
        with contextlib.suppress(CudaError):
            self._runtime.drain(self._stream)

    def _release(self) -> None:
        with contextlib.suppress(CudaError):
            self._runtime.activate()
            for event in self._idle_events:
                self._runtime.destroy_event(event)
            self._runtime.destroy_stream(self._stream)
        self._staging.close()

    def _choose(self, plan: CopyPlan) -> Method:
        if self._method is not None:
            return self._method
        flat = plan.num_pieces == plan.num_copies
        order = (
            self._ranking.order(plan.direction, flat, plan.mean_piece_bytes)
            if self._ranking is not None
            else UNMEASURED
        )
        # Single copies: slow for many pieces, right for all of them.
        able = (method for method in order if self._can(method, plan))
        return next(able, Method.SINGLE)

    def _can(self, method: Method, plan: CopyPlan) -> bool:
        if not method.runs_on(self._runtime):
            return False
        if method is Method.COPY_2D:
            limit = self._runtime.max_pitch_bytes
            pitches = (plan.src_pitch, plan.dst_pitch)
            return all(not len(p) or int(p.max()) <= limit for p in pitches)
        return True

    def _issue(self, part: _Part, plan: CopyPlan, method: Method) -> None:
        stream = self._stream
        if plan.num_copies == 0:
            return
        if method is Method.BATCH:
            p, stable = plan.pieces, plan.direction is Direction.LOAD
            self._runtime.copy_batch(p.dst, p.src, p.size, stable, stream)
        elif method is Method.SINGLE:
            p = plan.pieces
            for dst, src, size in zip(
                p.dst.tolist(), p.src.tolist(), p.size.tolist(), strict=True
            ):
                self._runtime.copy_2d(dst, size, src, size, size, 1, stream)
        elif method is Method.COPY_2D:
            columns = (plan.dst, plan.dst_pitch, plan.src, plan.src_pitch)
            shapes = (*columns, plan.width, plan.rows)
            for dst, dst_pitch, src, src_pitch, width, rows in zip(
                *(column.tolist() for column in shapes), strict=True
            ):
                self._runtime.copy_2d(
                    dst, dst_pitch, src, src_pitch, width, rows, stream
                )
        else:
            runs, num_tiles = pack_runs(plan)
            try:
                staging = part.staging = self._staging.take(runs.nbytes)
            except CudaError:  # the model has taken all device memory since
                has_batch = self._runtime.has_batch_copy
                other = Method.BATCH if has_batch else Method.SINGLE
                self._issue(part, plan, other)
                return
            ctypes.memmove(staging.host, runs.ctypes.data, runs.nbytes)
            size = runs.nbytes
            self._runtime.copy_2d(
                staging.device, size, staging.host, size, size, 1, stream
            )
            args = (staging.device, len(runs), num_tiles, TILE_BYTES)
            ctas = min(MAX_CTAS, -(-num_tiles // WARPS_PER_CTA))
            self._runtime.launch(KERNELS[plan.direction], ctas, args, stream)

    def _event(self) -> int:
        return (
            self._idle_events.pop()
            if self._idle_events
            else self._runtime.create_event()
        )
