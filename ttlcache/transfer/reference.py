"""Host to host, plain: the engine of CPU builds, and what the others are checked by.

Plans are copied one after the other, piece by piece, by a thread of the engine's own
or by whoever waits in `flush`: to hand a plan to another thread, and to a core whose
caches have not seen it, costs as much as several pieces. ctypes lets go of the
interpreter's lock while it copies.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from ttlcache.clock import stopwatch_s
from ttlcache.transfer.base import Failure, Outcome, Ticket, TransferEngine
from ttlcache.transfer.plan import CopyPlan


@dataclass(slots=True)
class _Job:
    """A plan under way. left: its pieces (target, source, bytes), where it stopped."""

    ticket: Ticket
    plan: CopyPlan
    left: Iterator[tuple[int, int, int]]
    seconds: float = 0.0


class ReferenceEngine(TransferEngine):
    """Copies with the C library's memmove."""

    name = "reference"

    def __init__(self) -> None:
        self._tickets = itertools.count(1)
        self._changed = threading.Condition()
        self._queue: deque[_Job] = deque()
        self._is_copying = False  # one thread at a time: plans end in their order
        self._open: set[Ticket] = set()
        self._ended: list[Outcome] = []
        self._closed = False
        self._thread = threading.Thread(
            target=self._work, name="ttlcache-transfer", daemon=True
        )
        self._thread.start()

    def submit(self, plan: CopyPlan, after: int = 0) -> Ticket:
        with self._changed:
            ticket = Ticket(next(self._tickets))
            if self._closed:
                self._fail(ticket, plan, Failure.CLOSED, "submitted after close")
            elif fault := self._fault(plan, after):
                self._fail(ticket, plan, Failure.INVALID_PLAN, fault)
            else:
                self._open.add(ticket)
                self._queue.append(_Job(ticket, plan, _pieces_of(plan)))
                self._changed.notify_all()
        return ticket

    def poll(self) -> list[Outcome]:
        with self._changed:
            ended, self._ended = self._ended, []
        return ended

    def order_after(self, ticket: Ticket, stream: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: ticket not in self._open)

    def flush(self, timeout_s: float) -> bool:
        deadline_s = stopwatch_s() + timeout_s
        with self._changed:
            while self._open and (left_s := deadline_s - stopwatch_s()) > 0:
                if self._queue and not self._is_copying:
                    self._copy_first(deadline_s)
                else:
                    self._changed.wait(left_s)
            return not self._open

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._is_copying)
            if self._queue and self._queue[0].seconds:
                self._copy_first(math.inf)  # a part of it is there
            for job in self._queue:
                self._open.discard(job.ticket)
                self._fail(
                    job.ticket, job.plan, Failure.CLOSED, "closed before its turn"
                )
            self._queue.clear()
            self._changed.notify_all()
        self._thread.join()

    @staticmethod
    def _fault(plan: object, after: int) -> str:
        if not isinstance(plan, CopyPlan):
            return f"not a plan: {plan!r}"
        return "the reference engine knows no device events" if after else ""

    def _fail(
        self, ticket: Ticket, plan: object, failure: Failure, detail: str
    ) -> None:
        num_bytes = plan.num_bytes if isinstance(plan, CopyPlan) else 0
        self._ended.append(Outcome(ticket, num_bytes, 0.0, failure, detail))

    def _work(self) -> None:
        with self._changed:
            while True:
                self._changed.wait_for(
                    lambda: self._closed or (self._queue and not self._is_copying)
                )
                if self._closed:
                    return
                self._copy_first(math.inf)

    def _copy_first(self, until_s: float) -> None:
        """Copy the first plan in this thread, or a part of it; called with the lock."""
        job = self._queue[0]
        self._is_copying = True
        self._changed.release()
        try:
            is_done = _copy(job, until_s)
        finally:
            self._changed.acquire()
            self._is_copying = False
            self._changed.notify_all()
        if is_done:
            self._queue.popleft()
            self._open.discard(job.ticket)
            self._ended.append(Outcome(job.ticket, job.plan.num_bytes, job.seconds))
        self._changed.notify_all()


def _pieces_of(plan: CopyPlan) -> Iterator[tuple[int, int, int]]:
    pieces = plan.pieces
    columns = pieces.dst.tolist(), pieces.src.tolist(), pieces.size.tolist()
    return zip(*columns, strict=True)


def _copy(job: _Job, until_s: float) -> bool:
    """Go on with a plan; whether it ended before `until_s`, a piece more or less."""
    began_s = stopwatch_s()
    is_done = True
    for dst, src, size in job.left:
        ctypes.memmove(dst, src, size)
        if until_s < math.inf and stopwatch_s() >= until_s:
            is_done = False
            break
    job.seconds += stopwatch_s() - began_s
    return is_done
