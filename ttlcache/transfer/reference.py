"""Host to host, plain: the engine of CPU builds, and what the others are checked by.

One thread copies piece by piece; ctypes lets go of the interpreter's lock meanwhile.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections import deque

from ttlcache.clock import stopwatch_s
from ttlcache.transfer.base import Failure, Outcome, Ticket, TransferEngine
from ttlcache.transfer.plan import CopyPlan


class ReferenceEngine(TransferEngine):
    """Copies with the C library's memmove in a thread of its own."""

    name = "reference"

    def __init__(self) -> None:
        self._tickets = itertools.count(1)
        self._changed = threading.Condition()
        self._queue: deque[tuple[Ticket, CopyPlan]] = deque()
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
                self._queue.append((ticket, plan))
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
        with self._changed:
            return self._changed.wait_for(lambda: not self._open, timeout_s)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            for ticket, plan in self._queue:
                self._open.discard(ticket)
                self._fail(ticket, plan, Failure.CLOSED, "closed before its turn")
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
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closed)
                if not self._queue:
                    return
                ticket, plan = self._queue.popleft()
            before_s = stopwatch_s()
            copy_pieces(plan)
            seconds = stopwatch_s() - before_s
            num_bytes = plan.num_bytes
            del plan  # its owners may go before the outcome is seen
            with self._changed:
                self._open.discard(ticket)
                self._ended.append(Outcome(ticket, num_bytes, seconds))
                self._changed.notify_all()


def copy_pieces(plan: CopyPlan) -> None:
    """Carry out a plan between addresses of this process, in this thread."""
    pieces = plan.pieces
    for dst, src, size in zip(
        pieces.dst.tolist(), pieces.src.tolist(), pieces.size.tolist(), strict=True
    ):
        ctypes.memmove(dst, src, size)
