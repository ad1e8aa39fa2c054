"""The contract of a transfer engine: submit, poll, close.

An engine runs copy plans in the background and reports each exactly once. It is
called by one mover thread at a time and never raises for a copy that failed.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, NewType

if TYPE_CHECKING:
    from ttlcache.transfer.plan import CopyPlan

Ticket = NewType("Ticket", int)


class Direction(enum.Enum):
    """Which way the bytes go."""

    STORE = "store"
    """From the engine's paged memory to host memory."""
    LOAD = "load"
    """From host memory into the engine's paged memory."""


class Failure(enum.Enum):
    """Why a plan was not carried out: a bounded set, fit for a metric label."""

    CLOSED = "closed"
    """Submitted to, or still queued in, a closed engine."""
    INVALID_PLAN = "invalid-plan"
    """Not a plan, or one that this engine cannot run."""
    NOT_PINNED = "host-not-pinned"
    """Host memory that was never registered with the device."""
    DEVICE_ERROR = "device-error"
    """The device or its driver refused or failed; see the detail."""
    BROKEN = "broken"
    """An earlier device error cannot be recovered from in this process."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a plan ended. Nothing of its memory is touched after this was reported.

    `seconds` is the time of the copies themselves, without the wait before them.
    """

    ticket: Ticket
    num_bytes: int
    seconds: float = 0.0
    failure: Failure | None = None
    detail: str = ""

    @property
    def ok(self) -> bool:
        return self.failure is None


class TransferEngine(ABC):
    """Runs copy plans in the background.

    Plans of one direction end in the order in which they were submitted. Between
    the two directions nothing is promised until an outcome is seen.
    """

    name: str

    @abstractmethod
    def submit(self, plan: CopyPlan, after: int = 0) -> Ticket:
        """Queue a plan and return at once; never raises, every fault is an outcome.

        Args:
            after: raw handle of a device event that the copies wait for, 0 for
                none. It must have been recorded before; the caller may destroy it
                once this returns.

        The memory that the plan names must stay valid until its outcome; what the
        plan lists in `owners` is kept alive until then.
        """

    @abstractmethod
    def poll(self) -> list[Outcome]:
        """Plans that ended since the last call, each reported once. Never waits."""

    @abstractmethod
    def order_after(self, ticket: Ticket, stream: int) -> None:
        """Work put on `stream` from now on sees what `ticket` copied.

        For a device stream this costs one event and no wait of this thread. Where
        there are no streams (reference engine) it waits for the copy. An unknown or
        ended ticket needs nothing. A failed copy does not raise: look at its outcome.
        """

    @abstractmethod
    def flush(self, timeout_s: float) -> bool:
        """Wait until all that was submitted has ended, not longer than `timeout_s`.

        For shutdown and for blocks that must be overwritten at once (preemption);
        not for the step's path. Outcomes still come from `poll`.
        """

    @abstractmethod
    def close(self) -> None:
        """End: copies under way finish, queued ones fail as CLOSED. Idempotent.

        `poll` may be called afterwards, for the last outcomes.
        """
