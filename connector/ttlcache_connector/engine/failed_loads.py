"""Requests whose load from elsewhere failed: vLLM's books, put right.

vLLM frees the blocks of such a request, if nothing of them is good, but leaves it
among those that hold blocks, before the whole waiting queue, and goes on reserving for
it what it held. If it does not fit then, nobody behind it is looked at, not even those
who hold the memory: the engine may stand still, pins or no pins.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.request import RequestStatus

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler

#: vLLM's queue before the waiting queue: since 0.32, and before.
_FIRST_QUEUES = ("kv_holding_waiting", "skipped_waiting")


def put_back(scheduler: Scheduler) -> None:
    """Requests that lost all their blocks wait like any other, and reserve nothing."""
    under_way = scheduler._inflight_prefills  # noqa: SLF001 - nothing public tells
    if not under_way:
        return
    block_ids = scheduler.kv_cache_manager.get_block_ids
    lost = [
        request
        for request in under_way
        if request.status is not RequestStatus.RUNNING
        and not any(block_ids(request.request_id))
    ]
    # A set has no order of its own: the same history gives the same queue.
    for request in sorted(lost, key=lambda r: (r.arrival_time, r.request_id)):
        # First in, then out: whatever happens, it is in some queue.
        scheduler.waiting.add_request(request)
        for name in _FIRST_QUEUES:
            if hasattr(scheduler, name):
                getattr(scheduler, name).remove_requests((request,))
        under_way.discard(request)
