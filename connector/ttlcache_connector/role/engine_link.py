"""The link to vLLM's scheduler and its queue; the prefills under way."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from ttlcache_connector.engine.request_view import is_loading, is_prompt_done

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request

    from ttlcache_connector.queue import HoldScope, ProgramQueue


class EngineLink:
    """Our own scheduler introduces itself, with its queue; a foreign one never does."""

    def __init__(self, scheduler_config: Any, *, by_request: bool = False) -> None:
        """
        Args:
            by_request: our own scheduler's queue is in vLLM's order.
        """
        self._by_request = by_request
        self._heeds_priority = scheduler_config.policy == "priority"
        self._queue: ProgramQueue | None = None
        self.asked_order = False  # a scheduler asked for the place of a request
        self.scheduler: Scheduler | None = None

    def attach(self, scheduler: Scheduler, queue: ProgramQueue) -> None:
        self.scheduler, self._queue, self.asked_order = scheduler, queue, True

    @property
    def by_program(self) -> bool:
        """Whether our scheduler serves by program: neither in the order of requests
        (`request-fcfs`) nor by clients' priorities."""
        ours = self.scheduler is not None and self.queue_follows_pin_ranks
        return ours and not self._heeds_priority

    @property
    def queue_follows_pin_ranks(self) -> bool:
        """Whether the queue is in the order in which pins rank: its scheduler, ours or
        not, asked for `priority`, and the ordering is not `request-fcfs`."""
        return self.asked_order and not self._by_request

    def user_priority(self, request: Request) -> int:
        # vLLM ignores `priority` unless the operator allowed it; so do we.
        return int(request.priority) if self._heeds_priority else 0

    def num_running(self) -> int | None:
        """Running requests, None under a foreign scheduler."""
        return None if self.scheduler is None else len(self.scheduler.running)

    def queue_counts(self) -> tuple[int, int]:
        """Requests that run and that wait; 0 under a foreign scheduler."""
        if self.scheduler is None:
            return 0, 0
        return len(self.scheduler.running), len(self.scheduler.waiting)

    def rekey(self, request_id: str) -> None:
        """The priority of a waiting request changed."""
        if self._queue is not None:
            self._queue.rekey(request_id)

    def hold_back(self, scope: HoldScope) -> None:
        """These requests do not start in this step."""
        if self._queue is not None:
            self._queue.hold_scope = scope

    def forget(self, request_id: str) -> None:
        """The request waits no more."""
        if self._queue is not None:
            self._queue.clear_overdue(request_id)

    def is_overdue(self, request: Request) -> bool:
        """Whether it has waited longer than the bound."""
        return self._queue is not None and self._queue.is_overdue(request.request_id)


class Prefills:
    """Requests that hold blocks, from their allocation to their first output token."""

    def __init__(self) -> None:
        self._requests: dict[str, Request] = {}
        #: Their KV is there, though vLLM calls them loading until they are at the head.
        self._loaded: set[str] = set()

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def start(self, request: Request) -> None:
        self._requests[request.request_id] = request
        self._loaded.discard(request.request_id)

    def end(self, request_id: str) -> None:
        self._requests.pop(request_id, None)
        self._loaded.discard(request_id)

    def on_loaded(self, request_ids: Iterable[str]) -> None:
        """All workers have their KV."""
        self._loaded.update(self._requests.keys() & request_ids)

    def is_loading(self) -> bool:
        """Whether a request that holds its blocks waits for remote KV."""
        # Looked up among those admitted, not in the queue: thousands may wait there.
        return any(is_loading(r) and r.request_id not in self._loaded for r in self)

    def take_done(self) -> list[Request]:
        """Those whose prompts are done, and which are none of these any more."""
        # A preempted request has output already when it loads its KV again.
        done = [
            request
            for request in self
            if request.num_output_tokens
            and is_prompt_done(request)
            and not is_loading(request)
        ]
        for request in done:
            self.end(request.request_id)
        return done
