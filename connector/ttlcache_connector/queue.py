"""The waiting queue in program order, as vLLM's `RequestQueue`."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

from sortedcontainers import SortedKeyList
from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.request import Request, RequestStatus

if TYPE_CHECKING:
    from ttlcache_connector.connector import TTLConnector


@dataclass(slots=True, eq=False)
class _Entry:
    """A queued request with the keys it was sorted in with.

    is_popped: in this step; vLLM puts it back if it cannot start.
    number: its own, so that it is found at once among those of one age.
    """

    request: Request
    queued_s: float
    number: int
    key: tuple[int, ...] = ()
    is_newcomer: bool = False
    is_popped: bool = False


class _Sorted:
    """Entries by a key. Those that were popped stay, and are passed over: vLLM may pop
    thousands in a step, and put them back, as for a LoRA adapter without a slot."""

    def __init__(self, key: Callable[[_Entry], Any]) -> None:
        self._entries: SortedKeyList[_Entry, Any] = SortedKeyList(key=key)
        # Of those after the first one that is not popped; None: begin anew.
        self._rest: Iterator[_Entry] | None = None
        self._first: _Entry | None = None

    def add(self, entry: _Entry) -> None:
        self._rest = None
        self._entries.add(entry)

    def remove(self, entry: _Entry) -> None:
        self._rest = None
        self._entries.remove(entry)

    def begin_anew(self) -> None:
        """A popped entry is back."""
        self._rest = None

    def first(self) -> _Entry | None:
        if self._rest is None:
            self._rest = iter(self._entries)
            self._first = next(self._rest, None)
        while self._first is not None and self._first.is_popped:
            self._first = next(self._rest, None)
        return self._first

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[_Entry]:
        return (entry for entry in self._entries if not entry.is_popped)


class HoldScope(Enum):
    """Which requests do not come out for the rest of a step."""

    NONE = auto()
    NEWCOMERS = auto()
    ALL = auto()


class ProgramQueue(RequestQueue):
    """O(log n) per operation; the first look after a change passes over what the step
    has popped.

    hold_scope: until the step ends. Once all are held back `bool(queue)` is False, so
        that vLLM stops; `len` and iteration still show them.

    Requests come out by key. Places that went out of date are put right when they
    reach the head, each at most once per quantum of its context. One that has waited
    for `max_wait_s` comes out before all that were not preempted, whatever its key.
    """

    def __init__(self, connector: TTLConnector, now_s: Callable[[], float]) -> None:
        self._connector = connector
        self._now_s = now_s
        self._entries: dict[str, _Entry] = {}
        # By key; apart, those that admission control may hold back.
        self._not_newcomers = _Sorted(key=lambda e: e.key)
        self._newcomers = _Sorted(key=lambda e: e.key)
        self.hold_scope = HoldScope.NONE
        # Never before one that clients want served first, by vLLM's own priority.
        self._by_age = _Sorted(key=_age)
        self._newcomers_by_age = _Sorted(key=_age)
        self._last_number = 0
        # Of this step: those that vLLM skips return with their place and age.
        self._popped: dict[str, _Entry] = {}
        self._peeked: _Entry | None = None
        self._max_waits_s: tuple[float, float] | None = None  # of this step
        self._overdue: set[str] = set()

    def add_request(self, request: Request) -> None:
        request_id = request.request_id
        known = self._entries.get(request_id)
        if known is not None:
            self._remove(request_id)
        entry = self._popped.pop(request_id, None)
        if entry is not None and entry.request is request:
            entry.is_popped = False
            for entries in self._lists_of(entry):
                entries.begin_anew()
        else:
            if entry is not None:
                self._take_out(entry)
            queued_s = None if known is None else known.queued_s
            if queued_s is None and request.status is not RequestStatus.PREEMPTED:
                queued_s = self._connector.queued_s(request)  # its load may have failed
            if queued_s is None:
                queued_s = self._now_s()
            self._last_number += 1
            entry = _Entry(request, queued_s, self._last_number)
            self._put_in(entry)
        self._entries[request_id] = entry

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
        entry.is_popped, self._peeked = True, None
        del self._entries[entry.request.request_id]
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
            self.clear_overdue(request.request_id)

    def rekey(self, request_id: str) -> None:
        """The request's place in the order changed; no-op if it is not queued."""
        entry = self._entries.get(request_id) or self._popped.get(request_id)
        if entry is None:
            return
        self._take_out(entry)
        self._put_in(entry)

    def clear_overdue(self, request_id: str) -> None:
        """The request was admitted or left: its waiting time is over."""
        self._overdue.discard(request_id)

    def is_overdue(self, request_id: str) -> bool:
        """Whether the request has waited longer than the bound."""
        return request_id in self._overdue

    def on_paused(self, paused_s: float) -> None:
        """The engine was told to stand still: nobody waited for others."""
        now_s = self._now_s()
        for aged in (self._by_age, self._newcomers_by_age):
            for entry in list(aged):
                aged.remove(entry)
                entry.queued_s = min(now_s, entry.queued_s + paused_s)
                aged.add(entry)

    def on_step_end(self) -> None:
        """Nothing is held back any more; what was popped and stayed out has started."""
        self.hold_scope, self._max_waits_s = HoldScope.NONE, None
        for entry in self._popped.values():
            self._take_out(entry)
        self._popped.clear()

    def __bool__(self) -> bool:
        if self.hold_scope is HoldScope.NONE:
            return bool(self._entries)
        if self.hold_scope is HoldScope.ALL:
            return False
        return self._not_newcomers.first() is not None

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Request]:
        entries = heapq.merge(self._not_newcomers, self._newcomers, key=lambda e: e.key)
        return iter([entry.request for entry in entries])

    def _head(self) -> _Entry:
        first = self._first()
        if first.request.status is RequestStatus.PREEMPTED:
            return first  # its client has a part of the answer; vLLM does the same
        if self._max_waits_s is None:
            self._max_waits_s = self.max_waits_s()
        for oldest, wait_s in self.oldest(self._max_waits_s):
            if self._now_s() - oldest.queued_s > wait_s:
                if oldest.request.request_id not in self._overdue:
                    self._overdue.add(oldest.request.request_id)
                    self._connector.on_overdue()
                return oldest
        while self._connector.refresh_place(first.request):
            self.rekey(first.request.request_id)
            first = self._first()
        return first

    def max_waits_s(self) -> tuple[float, float]:
        """After which requests of started programs, and newcomers, are overdue."""
        ask = self._connector.max_wait_s
        return ask(), ask(len(self._newcomers))

    def oldest(self, waits_s: tuple[float, float]) -> list[tuple[_Entry, float]]:
        """The oldest of each, with how long it may wait; only of the first priority."""
        firsts = self._by_age.first(), self._newcomers_by_age.first()
        found = [(e, s) for e, s in zip(firsts, waits_s, strict=True) if e is not None]
        first_class = min((entry.key[0] for entry, _ in found), default=0)
        ahead = (pair for pair in found if pair[0].key[0] == first_class)
        return sorted(ahead, key=lambda pair: _age(pair[0]))

    def _first(self) -> _Entry:
        started, newcomer = self._not_newcomers.first(), self._newcomers.first()
        if newcomer is None:
            assert started is not None
            return started
        if started is None:
            return newcomer
        passes = self.hold_scope is HoldScope.NEWCOMERS or started.key < newcomer.key
        return started if passes else newcomer

    def _put_in(self, entry: _Entry) -> None:
        """With the place that it has now."""
        entry.key = self._connector.priority(entry.request)
        entry.is_newcomer = self._connector.is_newcomer(entry.request)
        for entries in self._lists_of(entry):
            entries.add(entry)

    def _take_out(self, entry: _Entry) -> None:
        for entries in self._lists_of(entry):
            entries.remove(entry)

    def _lists_of(self, entry: _Entry) -> tuple[_Sorted, _Sorted]:
        if entry.is_newcomer:
            return self._newcomers, self._newcomers_by_age
        return self._not_newcomers, self._by_age

    def _remove(self, request_id: str) -> None:
        entry = self._entries.pop(request_id)
        self._take_out(entry)
        if self._peeked is entry:
            self._peeked = None


def _age(entry: _Entry) -> tuple[float, ...]:
    return entry.key[0], entry.queued_s, entry.number
