"""The contract of a transfer engine: submit, poll, close.

An engine runs copy plans in the background, one after the other, and
reports each exactly once. It never raises for a copy that failed. Stores and loads get
an engine each, so that a load never waits for a store.
"""

from __future__ import annotations

import enum
import itertools
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NewType

from ttlcache.transfer.plan import CopyPlan

Ticket = NewType("Ticket", int)

#: Copied without a look at whether it is still wanted; three of them take a host link
#: of 55 GB/s less than a millisecond, for which a small copy of the model may wait.
PART_BYTES = 16 << 20
#: Waited for the plan under way at the end of the process.
CLOSE_TIMEOUT_S = 5.0


class Failure(enum.Enum):
    """Why a plan was not carried out: a bounded set, fit for a metric label."""

    CANCELLED = "cancelled"
    """The caller did not want the rest of it."""
    CLOSED = "closed"
    """Submitted to, or still queued in, a closed engine."""
    INVALID_PLAN = "invalid-plan"
    """One that this engine cannot run."""
    NOT_PINNED = "host-not-pinned"
    """Host memory that was never registered with the device."""
    DEVICE_ERROR = "device-error"
    """The device or its driver refused or failed; see the detail."""
    BROKEN = "broken"
    """An earlier device error cannot be recovered from in this process."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a plan ended. Nothing of its memory is touched after this was reported.

    num_bytes: of the whole plan, also where it failed.
    seconds: of the copies themselves, without the wait before them.
    """

    ticket: Ticket
    num_bytes: int
    seconds: float = 0.0
    failure: Failure | None = None
    detail: str = ""

    @property
    def ok(self) -> bool:
        return self.failure is None


def always_wanted() -> bool:
    """A copy that is wanted to its end."""
    return True


@dataclass(slots=True)
class Job:
    """A plan from `submit` to its outcome."""

    ticket: Ticket
    plan: CopyPlan
    after: int
    is_wanted: Callable[[], bool]
    failure: Failure | None = None
    detail: str = ""

    def fail(self, failure: Failure, detail: str) -> None:
        self.failure, self.detail = failure, detail


class TransferEngine(ABC):
    """Runs copy plans in the background, in the order in which they were submitted.

    Subclasses say how one plan is copied: `_run`, and `_land` where copies go on after
    it. They call this constructor last: it starts the thread.
    """

    name: str

    def __init__(self) -> None:
        self._tickets = itertools.count(1)
        # Guards what the callers and the thread share.
        self._state = threading.Condition()
        self._queue: deque[Job] = deque()
        self._open: dict[Ticket, Job] = {}
        self._ended: list[Outcome] = []
        self._broken = ""
        self._closed = False
        self._thread = threading.Thread(
            target=self._work, name="ttlcache-copies", daemon=True
        )
        self._thread.start()

    def submit(
        self,
        plan: CopyPlan,
        after: int = 0,
        is_wanted: Callable[[], bool] = always_wanted,
    ) -> Ticket:
        """Queue a plan and return at once; never raises, every fault is an outcome.

        Args:
            after: raw handle of a device event that the copies wait for, 0 for
                none. It must have been recorded before, and live until the outcome:
                list its object in the plan's `owners`.
            is_wanted: asked before each part of `PART_BYTES`, on the thread; after a
                no the rest is not copied, and the plan ends as CANCELLED.

        The memory that the plan names must stay valid until its outcome; what the
        plan lists in `owners` is kept alive until then.
        """
        with self._state:
            job = Job(Ticket(next(self._tickets)), plan, after, is_wanted)
            self._open[job.ticket] = job
            if self._closed:
                job.fail(Failure.CLOSED, "submitted after close")
            elif self._broken:
                job.fail(Failure.BROKEN, self._broken)
            else:
                self._check(job)
            if job.failure is None:
                self._queue.append(job)
                self._state.notify_all()
            else:
                self._end(job)
            return job.ticket

    def poll(self) -> list[Outcome]:
        """Plans that ended since the last call, each reported once. Never waits."""
        with self._state:
            ended, self._ended = self._ended, []
        return ended

    def flush(self, timeout_s: float) -> bool:
        """Wait until all that was submitted has ended, not longer than `timeout_s`.

        On the step's path only with a short limit. Outcomes still come from `poll`.
        """
        with self._state:
            return self._state.wait_for(lambda: not self._open, timeout_s)

    def close(self) -> bool:
        """End: the plan under way finishes, queued ones fail as CLOSED. Idempotent.

        `poll` may be called afterwards, for the last outcomes.

        Returns:
            False: the plan under way has not ended within `CLOSE_TIMEOUT_S`. It is
            never reported, and its memory must stay.
        """
        with self._state:
            self._closed = True
            while self._queue:
                job = self._queue.popleft()
                job.fail(Failure.CLOSED, "closed before its turn")
                self._end(job)
            self._state.notify_all()
        self._thread.join(CLOSE_TIMEOUT_S)
        return not self._thread.is_alive()

    def _check(self, job: Job) -> None:  # noqa: B027 - most plans can be run
        """Fails a job that this engine cannot run; on the caller's thread."""

    @abstractmethod
    def _run(self, job: Job) -> None:
        """Copy, or begin to; `_end` follows here or in `_land`."""

    @property
    def _is_copying(self) -> bool:
        """Copies go on for which `_land` waits."""
        return False

    def _land(self) -> None:  # noqa: B027 - only where `_is_copying` may be true
        """Wait for the oldest copies that go on."""

    def _stop(self) -> None:  # noqa: B027 - only where `_is_copying` may be true
        """After a fault: wait until nothing copies any more, or the device is lost."""

    def _release(self) -> None:  # noqa: B027 - most hold nothing
        """Give back what the engine holds, at the end of the thread."""

    def _end(self, job: Job, seconds: float = 0.0) -> None:
        with self._state:
            del self._open[job.ticket]
            sizes = (job.plan.num_bytes, seconds)
            outcome = Outcome(job.ticket, *sizes, job.failure, job.detail)
            del job.plan  # its owners may go before the outcome is seen
            self._ended.append(outcome)
            self._state.notify_all()

    def _work(self) -> None:
        try:
            while self._has_work():
                with self._state:
                    job = self._queue.popleft() if self._queue else None
                if job is None:
                    self._land()
                else:
                    self._run(job)
        except Exception as error:  # noqa: BLE001 - every plan has an outcome
            self._stop()
            self._break(str(error) or repr(error))
        self._release()

    def _has_work(self) -> bool:
        """Sleeps until there is; False after `close`, when no copies go on."""
        with self._state:
            while not (self._queue or self._is_copying):
                if self._closed:
                    return False
                self._state.wait()
            return True

    def _break(self, why: str) -> None:
        """After a fault that no plan alone has: nothing more will run."""
        with self._state:
            self._broken = why
            self._queue.clear()
            for job in list(self._open.values()):
                job.fail(Failure.BROKEN, job.detail or why)
                self._end(job)
