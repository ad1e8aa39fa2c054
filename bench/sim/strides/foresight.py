"""What the connector would do later if nothing happened until then.

Strides need two answers: when time alone changes something inside the connector, and
whether admission control, which may let programs in as time goes by, would still keep
the waiting request out.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from ttlcache.clock import VirtualClock
from ttlcache.types import Admission
from ttlcache_connector.connector import TTLConnector
from ttlcache_connector.queue import ProgramQueue


class Foresight:
    """Of one engine; without a connector nothing ever happens by itself."""

    def __init__(
        self, scheduler: Any, clock: VirtualClock, connector: TTLConnector | None
    ) -> None:
        self._clock = clock
        self._queue = scheduler.waiting
        self._side = connector.side if connector is not None else None
        self._asked: tuple[str, int] | None = None
        if self._side is not None:
            self._listen(self._side)

    def deadlines(self) -> Iterator[float | None]:
        """Times at which pins expire, programs are forgotten, or the queue changes."""
        if self._side is None or self._side.controller is None:
            return
        yield self._side.controller.pins.next_deadline_s()
        yield self._side.controller.programs.next_idle_s()
        if isinstance(self._queue, ProgramQueue):
            yield from self._queue.changes_s()

    def state(self) -> int:
        """Changes with every pin that is made, shortened or ended."""
        if self._side is None or self._side.controller is None:
            return 0
        return int(self._side.controller.pins.version)

    def forget(self) -> None:
        """Before each call of `schedule()`."""
        self._asked = None

    def still_refused(self, time_s: float) -> bool:
        """Whether admission control keeps out at `time_s` whom it kept out last."""
        controller = self._side.controller if self._side is not None else None
        if self._asked is None or controller is None:
            return True
        now_s = self._clock.now_s()
        entrance = controller._entrance  # noqa: SLF001 - asked on a copy, then put back
        real, entrance.control = entrance.control, copy.copy(entrance.control)
        self._clock.set(time_s)
        try:
            answer: Admission = controller.admission(*self._asked)
            return answer is Admission.WAIT
        finally:
            self._clock.set(now_s)
            entrance.control = real

    def _listen(self, side: Any) -> None:
        """Remember the question that was answered with WAIT last."""
        ask = side.admission

        def admission(request: Any, needed_blocks: int) -> Admission:
            answer: Admission = ask(request, needed_blocks)
            waits = answer is Admission.WAIT
            self._asked = (request.request_id, needed_blocks) if waits else None
            return answer

        side.admission = admission
