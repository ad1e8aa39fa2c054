"""Host to host, plain: the engine of CPU builds, and what the others are checked by.

A thread of its own copies one plan after the other, piece by piece. ctypes lets go of
the interpreter's lock while it copies.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor, wait

from ttlcache.clock import stopwatch_s
from ttlcache.transfer.base import Failure, Outcome, Ticket, TransferEngine
from ttlcache.transfer.plan import CopyPlan


class ReferenceEngine(TransferEngine):
    """Copies with the C library's memmove."""

    name = "reference"

    def __init__(self) -> None:
        self._tickets = itertools.count(1)
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, "ttlcache-transfer")
        self._queue: deque[tuple[Ticket, CopyPlan]] = deque()
        self._open: dict[Ticket, Future[None]] = {}
        self._ended: list[Outcome] = []
        self._closed = False

    def submit(self, plan: CopyPlan, after: int = 0) -> Ticket:
        with self._lock:
            ticket = Ticket(next(self._tickets))
            if self._closed:
                self._fail(ticket, plan, Failure.CLOSED, "submitted after close")
            elif fault := _fault(plan, after):
                self._fail(ticket, plan, Failure.INVALID_PLAN, fault)
            else:
                self._queue.append((ticket, plan))
                self._open[ticket] = self._thread.submit(self._copy_first)
        return ticket

    def poll(self) -> list[Outcome]:
        with self._lock:
            ended, self._ended = self._ended, []
        return ended

    def order_after(self, ticket: Ticket, stream: int) -> None:
        with self._lock:
            copy = self._open.get(ticket)
        if copy is not None:
            wait([copy])

    def flush(self, timeout_s: float) -> bool:
        with self._lock:
            copies = list(self._open.values())
        return not wait(copies, timeout_s).not_done

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self._thread.shutdown(cancel_futures=True)
        for ticket, plan in self._queue:
            self._fail(ticket, plan, Failure.CLOSED, "closed before its turn")
        self._queue.clear()
        self._open.clear()

    def _fail(
        self, ticket: Ticket, plan: object, failure: Failure, detail: str
    ) -> None:
        num_bytes = plan.num_bytes if isinstance(plan, CopyPlan) else 0
        self._ended.append(Outcome(ticket, num_bytes, 0.0, failure, detail))

    def _copy_first(self) -> None:
        ticket, plan = self._queue.popleft()
        began_s, failure, detail = stopwatch_s(), None, ""
        try:
            pieces = plan.pieces
            columns = pieces.dst.tolist(), pieces.src.tolist(), pieces.size.tolist()
            for dst, src, size in zip(*columns, strict=True):
                ctypes.memmove(dst, src, size)
        except Exception as error:  # noqa: BLE001 - every plan has an outcome
            failure, detail = Failure.DEVICE_ERROR, repr(error)
        seconds = stopwatch_s() - began_s
        outcome = Outcome(ticket, plan.num_bytes, seconds, failure, detail)
        del plan  # its owners may go before the outcome is seen
        with self._lock:
            self._open.pop(ticket, None)
            self._ended.append(outcome)


def _fault(plan: object, after: int) -> str:
    if not isinstance(plan, CopyPlan):
        return f"not a plan: {plan!r}"
    return "the reference engine knows no device events" if after else ""
