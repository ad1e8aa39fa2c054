"""What the connector would do later if nothing happened until then.

Strides need to know when time alone changes something inside the connector.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ttlcache.scheduling.admission import GrowthReserve
from ttlcache_connector.connector import TTLConnector
from ttlcache_connector.queue import ProgramQueue


class Foresight:
    """Of one engine; without a connector nothing ever happens by itself."""

    def __init__(self, scheduler: Any, connector: TTLConnector | None) -> None:
        self._queue = scheduler.waiting
        self._role = connector.scheduler_role if connector is not None else None

    def deadlines(self) -> Iterator[float | None]:
        """Times at which pins expire, programs are forgotten, or the queue changes."""
        if self._role is None:
            return
        controller = self._role.parts.controller
        yield controller.pins.next_deadline_s()
        yield controller.programs.next_idle_s()
        if isinstance(controller.admission, GrowthReserve):
            yield controller.memory.admits_all_from_s
        if isinstance(self._queue, ProgramQueue):
            for oldest, wait_s in self._queue.oldest(self._queue.max_waits_s()):
                overdue_s = oldest.queued_s + wait_s
                if not self._queue.is_overdue(oldest.request.request_id):
                    # W may have become shorter: this is news then.
                    overdue_s = max(overdue_s, self._role.parts.clock.now_s())
                yield overdue_s

    def state(self) -> tuple[float, ...]:
        """Changes with every pin that is made, shortened or ended, and with W."""
        if self._role is None:
            return ()
        version = self._role.parts.controller.pins.version
        return version, self._role.scheduling.max_wait_s()
