"""Copies between device and pinned host memory, beside the forward pass.

One stream a direction, none of them the model's. Order comes from events only: a copy
waits for the event that the caller hands over, the caller's stream waits for the
copy's. Nothing here synchronises a stream or the device.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import enum
import itertools
import math
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from ttlcache.clock import stopwatch_s
from ttlcache.transfer.base import Direction, Failure, Outcome, Ticket, TransferEngine
from ttlcache.transfer.cuda import KERNELS, TILE_BYTES, CudaError, pack_runs
from ttlcache.transfer.cupy_runtime import CupyRuntime
from ttlcache.transfer.host_memory import PinnedRanges, Staging, StagingPool
from ttlcache.transfer.plan import CopyPlan

WARPS_PER_CTA = 8
#: Pause between two looks of `flush`.
LOOK_EVERY_S = 100e-6
#: A kernel takes multiprocessors from the model, so it has to win by this.
KERNEL_MARGIN = 1.15


class Method(enum.Enum):
    """How a plan's copies are issued; the value is the name in logs and results."""

    COPY_2D = "copy-2d"
    """One 2-D copy call a run."""
    BATCH = "batch"
    """One driver call for all pieces."""
    SINGLE = "single"
    """One call a piece: where pitches are too wide and there is nothing else."""
    KERNEL_8 = "kernel-8"
    """A csrc kernel on 8 thread blocks."""
    KERNEL_32 = "kernel-32"
    """A csrc kernel on 32 thread blocks."""

    def runs_on(self, runtime: CupyRuntime) -> bool:
        """Whether the device and its driver have what it takes."""
        if self is Method.BATCH:
            return runtime.has_batch_copy
        return runtime.kernels_reach_host or not self.ctas

    @property
    def ctas(self) -> int:
        """Thread blocks of the kernel; 0: no kernel."""
        return {Method.KERNEL_8: 8, Method.KERNEL_32: 32}.get(self, 0)


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

    def order(
        self, direction: Direction, flat: bool, piece_bytes: float
    ) -> list[Method]:
        """Methods for such pieces, best first, by the nearest size on a log scale."""
        sizes = sorted({p.piece_bytes for p in self.cost})
        middles = [math.sqrt(a * b) for a, b in itertools.pairwise(sizes)]
        size = sizes[bisect.bisect(middles, piece_bytes)]
        costs = self.cost[Probe(direction, flat, size)]
        return sorted(costs, key=lambda m: costs[m] * (KERNEL_MARGIN if m.ctas else 1))


#: Without calibration: the copy engine.
UNMEASURED = (Method.BATCH, Method.COPY_2D)


@dataclass(slots=True)
class _Flight:
    """A plan on the device."""

    ticket: Ticket
    plan: CopyPlan
    begun: int
    done: int
    staging: Staging | None = None
    fault: str = ""


class CupyEngine(TransferEngine):
    """Runs plans on a CUDA device.

    Args:
        runtime: the device; `CupyRuntime()` for a real one.
        ranking: of the methods, from `calibrate`; None: copy engine first.
        method: always this one (benches and tests).
    """

    name = "cupy"

    def __init__(
        self,
        runtime: CupyRuntime,
        ranking: Ranking | None = None,
        method: Method | None = None,
    ) -> None:
        self._runtime = runtime
        self._ranking = ranking
        self._method = method
        self._lock = threading.Lock()
        self._tickets = itertools.count(1)
        self._flights: dict[Direction, deque[_Flight]] = {d: deque() for d in Direction}
        self._ended: list[Outcome] = []
        self._idle_events: list[int] = []
        self._broken = ""
        self._closed = False
        self.pinned = PinnedRanges(runtime)
        self._staging = StagingPool(runtime)
        runtime.activate()
        # A load is waited for by a request, a store by nobody.
        self._streams = {
            d: runtime.create_stream(low_priority=d is Direction.STORE)
            for d in Direction
        }

    def submit(self, plan: CopyPlan, after: int = 0) -> Ticket:
        with self._lock:
            ticket = Ticket(next(self._tickets))
            failure, detail = self._refusal(plan)
            if failure is None:
                self._start(ticket, plan, after)
            else:
                num_bytes = plan.num_bytes if isinstance(plan, CopyPlan) else 0
                self._ended.append(Outcome(ticket, num_bytes, 0.0, failure, detail))
        return ticket

    def poll(self) -> list[Outcome]:
        with self._lock:
            self._collect()
            ended, self._ended = self._ended, []
        return ended

    def order_after(self, ticket: Ticket, stream: int) -> None:
        with self._lock:
            for flight in itertools.chain(*self._flights.values()):
                if flight.ticket == ticket:
                    try:
                        self._runtime.activate()
                        self._runtime.stream_wait(stream, flight.done)
                    except CudaError as error:
                        # The stream may read too early: these bytes do not count.
                        flight.fault = flight.fault or str(error)

    def flush(self, timeout_s: float) -> bool:
        until_s, pause = stopwatch_s() + timeout_s, threading.Event()
        while True:
            with self._lock:
                self._collect()
                if not any(self._flights.values()):
                    return True
            if stopwatch_s() >= until_s:
                return False
            pause.wait(LOOK_EVERY_S)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._drain()
            with contextlib.suppress(CudaError):
                for event in self._idle_events:
                    self._runtime.destroy_event(event)
                for stream in self._streams.values():
                    self._runtime.destroy_stream(stream)
            self._staging.close()
            self.pinned.close()

    def _refusal(self, plan: object) -> tuple[Failure | None, str]:
        if self._closed:
            return Failure.CLOSED, "submitted after close"
        if not isinstance(plan, CopyPlan):
            return Failure.INVALID_PLAN, f"not a plan: {plan!r}"
        if self._broken:
            return Failure.BROKEN, self._broken
        # A kernel that touches unpinned memory kills the process's CUDA context.
        outside = self.pinned.first_outside(plan)
        if outside is not None:
            text = f"host memory at {outside:#x} was never pinned"
            return Failure.NOT_PINNED, text
        return None, ""

    def _start(self, ticket: Ticket, plan: CopyPlan, after: int) -> None:
        stream = self._streams[plan.direction]
        try:
            self._runtime.activate()
            flight = _Flight(ticket, plan, self._event(), self._event())
        except CudaError as error:
            self._end(ticket, plan, 0.0, Failure.DEVICE_ERROR, str(error))
            return
        try:
            if after:
                self._runtime.stream_wait(stream, after)
            self._runtime.record(flight.begun, stream)
            self._issue(flight, self._choose(plan), stream)
        except CudaError as error:
            flight.fault = str(error)
        try:
            # Also after a fault: copies issued before it may still be under way, and
            # the plan's memory is theirs until this event is reached.
            self._runtime.record(flight.done, stream)
            self._flights[plan.direction].append(flight)
        except CudaError as error:
            self._break(str(error))
            self._end(ticket, plan, 0.0, Failure.BROKEN, flight.fault or str(error))

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

    def _issue(self, flight: _Flight, method: Method, stream: int) -> None:
        plan = flight.plan
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
            staging = flight.staging = self._staging.take(runs.nbytes)
            ctypes.memmove(staging.host, runs.ctypes.data, runs.nbytes)
            size = runs.nbytes
            self._runtime.copy_2d(
                staging.device, size, staging.host, size, size, 1, stream
            )
            args = (staging.device, len(runs), num_tiles, TILE_BYTES)
            ctas = min(method.ctas, -(-num_tiles // WARPS_PER_CTA))
            self._runtime.launch(KERNELS[plan.direction], ctas, args, stream)

    def _collect(self) -> None:
        """Report the flights that have landed, oldest first in each direction."""
        for direction, flights in self._flights.items():
            try:
                if flights:
                    self._runtime.activate()
                while flights and self._runtime.is_done(flights[0].done):
                    flight, seconds = flights[0], 0.0
                    if not flight.fault:  # else it may not have begun
                        seconds = self._runtime.elapsed_s(flight.begun, flight.done)
                    self._land(flights.popleft(), seconds)
            except CudaError as error:
                self._break(str(error))
                self._abandon(direction)

    def _land(self, flight: _Flight, seconds: float) -> None:
        self._idle_events += (flight.begun, flight.done)
        if flight.staging is not None:
            self._staging.give_back(flight.staging)
        failure = Failure.DEVICE_ERROR if flight.fault else None
        self._end(flight.ticket, flight.plan, seconds, failure, flight.fault)

    def _abandon(self, direction: Direction) -> None:
        """After an error of the device itself: nothing more will run or land."""
        flights = self._flights[direction]
        while flights:
            flight = flights.popleft()
            detail = flight.fault or self._broken
            self._end(flight.ticket, flight.plan, 0.0, Failure.BROKEN, detail)

    def _drain(self) -> None:
        for direction, flights in self._flights.items():
            try:
                self._runtime.activate()
                while flights:
                    self._runtime.wait(flights[0].done)
                    self._land(flights.popleft(), 0.0)
            except CudaError as error:
                self._break(str(error))
                self._abandon(direction)

    def _break(self, why: str) -> None:
        self._broken = self._broken or why

    def _end(
        self,
        ticket: Ticket,
        plan: CopyPlan,
        seconds: float,
        failure: Failure | None,
        detail: str,
    ) -> None:
        outcome = Outcome(ticket, plan.num_bytes, seconds, failure, detail)
        self._ended.append(outcome)

    def _event(self) -> int:
        return (
            self._idle_events.pop()
            if self._idle_events
            else (self._runtime.create_event())
        )
