"""A scheduler that is not ours: vLLM's, with a queue that asks TTLConnector.

It serves as docs/scheduling.md says: order, room and memory by three questions, without
`TTLScheduler` or any other class of ours.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.request_queue import FCFSRequestQueue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from ttlcache.types import Admission, Urgency


class AskingQueue(FCFSRequestQueue):
    """Sorted anew whenever vLLM looks at it; empty while its head must wait."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__()
        self._scheduler = scheduler
        self._connector: Any = scheduler.connector

    def peek_request(self) -> Request:
        first = min(self, key=self._connector.priority)
        self.remove(first)
        self.appendleft(first)
        return first

    def __bool__(self) -> bool:
        return len(self) > 0 and self._may_start(self.peek_request())

    def _may_start(self, request: Request) -> bool:
        if not self._scheduler.running:
            return True
        needed = -(-request.num_tokens // self._scheduler.block_size)
        if self._connector.admission(request, needed) is Admission.ADMIT:
            return True
        self._connector.eviction(needed, request, Urgency.HELD_BACK)
        return bool(self._connector.admission(request, needed) is Admission.ADMIT)


class OwnScheduler(Scheduler):
    """What allocates blocks stays vLLM's: pins give way in `allocate_slots`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.waiting = AskingQueue(self)

    def add_request(self, request: Request) -> None:
        assert self.connector is not None
        self.connector.on_new_request(request)  # the queue will ask about it
        super().add_request(request)
