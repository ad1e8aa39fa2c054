"""The waiting queue in program order, as vLLM's `RequestQueue`."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from sortedcontainers import SortedKeyList
from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.request import Request, RequestStatus


class QueueCallbacks(Protocol):
    """What gives the order; `TTLConnector` does."""

    def priority(self, request: Request) -> tuple[int, ...]:
        """Sort key; must stay the same until `ProgramQueue.rekey` is called, its first
        number, the user's priority, for ever."""
        ...

    def is_newcomer(self, request: Request) -> bool:
        """Whether admission control may hold it back."""
        ...

    def refresh_place(self, request: Request) -> bool:
        """Whether the place of the head is out of date: `priority` answers anew."""
        ...

    def max_wait_s(self) -> float:
        """The bound on waiting, in seconds."""
        ...

    def on_overdue(self) -> None:
        """A request reached that bound."""
        ...


@dataclass(slots=True, eq=False)
class _Entry:
    """A queued request with the keys it was sorted in with."""

    request: Request
    queued_s: float
    key: tuple[int, ...] = ()
    is_newcomer: bool = False


class Held(Enum):
    """Which requests do not come out for the rest of a step."""

    NONE = auto()
    NEWCOMERS = auto()
    ALL = auto()


class ProgramQueue(RequestQueue):
    """O(log n) per operation; never scanned by a scheduling step.

    held: until the step ends. vLLM takes more while the queue is true, so it is false
        once all are held; its length and what it iterates over stay.

    Requests come out by key. Places that went out of date are put right when they
    reach the head, each at most once per quantum of its context. One that has waited
    for `max_wait_s` comes out before all that were not preempted, whatever its key.
    """

    def __init__(self, callbacks: QueueCallbacks, now_s: Callable[[], float]) -> None:
        self._callbacks = callbacks
        self._now_s = now_s
        self._entries: dict[str, _Entry] = {}
        # By key; apart, those that admission control may hold back.
        self._started: SortedKeyList[_Entry, tuple[int, ...]]
        self._started = SortedKeyList(key=lambda e: e.key)
        self._newcomers: SortedKeyList[_Entry, tuple[int, ...]]
        self._newcomers = SortedKeyList(key=lambda e: e.key)
        self.held = Held.NONE
        # Never before one that clients want served first, by vLLM's own priority.
        self._by_age: SortedKeyList[_Entry, tuple[int, float]]
        self._by_age = SortedKeyList(key=lambda e: (e.key[0], e.queued_s))
        # Of this step: those that vLLM skips return with their place and age.
        self._popped: dict[str, _Entry] = {}
        self._peeked: _Entry | None = None
        self._overdue: set[str] = set()

    def add_request(self, request: Request) -> None:
        request_id = request.request_id
        known = self._entries.get(request_id)
        if known is not None:
            self._remove(request_id)
        entry = self._popped.pop(request_id, None)
        if entry is None or entry.request is not request:
            queued_s = self._now_s() if known is None else known.queued_s
            entry = _Entry(request, queued_s)
            self._read_place(entry)
        self._entries[request_id] = entry
        self._by_age.add(entry)
        self._list_of(entry).add(entry)

    def peek_request(self) -> Request:
        if not self._entries:
            raise IndexError("peek from an empty queue")
        self._peeked = self._head()
        return self._peeked.request

    def pop_request(self) -> Request:
        """Remove the request last peeked at, or the head.

        vLLM peeks, allocates, then pops. Allocation may release pins and so
        change keys; the pop must still return what was allocated for.
        """
        if not self._entries:
            raise IndexError("pop from an empty queue")
        entry = self._peeked if self._peeked is not None else self._head()
        self._remove(entry.request.request_id)
        self._popped[entry.request.request_id] = entry
        return entry.request

    def prepend_request(self, request: Request) -> None:
        self.add_request(request)

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self.add_request(request)

    def remove_request(self, request: Request) -> None:
        self.remove_requests((request,))

    def remove_requests(self, requests: Iterable[Request]) -> None:
        for request in requests:
            if request.request_id in self._entries:
                self._remove(request.request_id)
            self.forget(request.request_id)

    def rekey(self, request_id: str) -> None:
        """The request's place in the order changed; no-op if it is not queued."""
        if request_id in self._popped:
            self._read_place(self._popped[request_id])
        entry = self._entries.get(request_id)
        if entry is None:
            return
        self._list_of(entry).remove(entry)
        self._read_place(entry)
        self._list_of(entry).add(entry)

    def forget(self, request_id: str) -> None:
        """The request was admitted or left: its waiting time is over."""
        self._overdue.discard(request_id)

    def is_overdue(self, request_id: str) -> bool:
        """Whether the request has waited longer than the bound."""
        return request_id in self._overdue

    def on_paused(self, paused_s: float) -> None:
        """The engine was told to stand still: nobody waited for others."""
        now_s = self._now_s()
        for entry in self._entries.values():
            entry.queued_s = min(now_s, entry.queued_s + paused_s)
        self._by_age = SortedKeyList(list(self._by_age), key=self._by_age.key)

    def on_step_end(self) -> None:
        """Nothing is held any more; what was popped and did not return has started."""
        self.held = Held.NONE
        self._popped.clear()

    def __bool__(self) -> bool:
        if self.held is Held.NONE:
            return bool(self._entries)
        return self.held is Held.NEWCOMERS and bool(self._started)

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Request]:
        entries = heapq.merge(self._started, self._newcomers, key=lambda e: e.key)
        return iter([entry.request for entry in entries])

    def changes_s(self) -> Iterator[float]:
        """When time alone will change the order, for simulators."""
        if self._by_age:
            yield self._by_age[0].queued_s + self._callbacks.max_wait_s()

    def _head(self) -> _Entry:
        first = self._first()
        if first.request.status is RequestStatus.PREEMPTED:
            return first  # its client has a part of the answer; vLLM does the same
        oldest: _Entry = self._by_age[0]
        waited_s = self._now_s() - oldest.queued_s
        if waited_s > self._callbacks.max_wait_s():
            if oldest.request.request_id not in self._overdue:
                self._overdue.add(oldest.request.request_id)
                self._callbacks.on_overdue()
            return oldest
        while self._callbacks.refresh_place(first.request):
            self.rekey(first.request.request_id)
            first = self._first()
        return first

    def _first(self) -> _Entry:
        newcomers: Sequence[_Entry] = self._newcomers
        started: Sequence[_Entry] = self._started
        if not newcomers or (started and self.held is Held.NEWCOMERS):
            return started[0]
        if started and started[0].key < newcomers[0].key:
            return started[0]
        return newcomers[0]

    def _read_place(self, entry: _Entry) -> None:
        entry.key = self._callbacks.priority(entry.request)
        entry.is_newcomer = self._callbacks.is_newcomer(entry.request)

    def _list_of(self, entry: _Entry) -> SortedKeyList[_Entry, tuple[int, ...]]:
        return self._newcomers if entry.is_newcomer else self._started

    def _remove(self, request_id: str) -> None:
        entry = self._entries.pop(request_id)
        self._list_of(entry).remove(entry)
        self._by_age.remove(entry)
        if self._peeked is entry:
            self._peeked = None
