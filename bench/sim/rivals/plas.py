"""Autellix (arXiv 2502.13965, §4.2): program-level attained service, least first.

A program's service is the time that its finished calls ran, from the allocation of
their memory on. Ranges of service form queues, each `GROWTH` times as long as the one
before; a call waits in the queue of its program's service, first come first served
inside it. Against starvation a call goes to the first queue, and its program's counters
start anew, when (W_p + W_c) / (T_p + T_c) >= BETA: wait over service of the program and
this call, which has no service yet (T_c = 0). Preempted calls resume first. The paper
gives no values: ours start at one second and double.
"""

from __future__ import annotations

import heapq
import itertools
import math
from dataclasses import dataclass
from typing import Any, cast

from vllm.v1.request import Request, RequestStatus

from ttlcache.clock import default_clock
from ttlcache.programs.model import RequestRecord
from ttlcache_connector.connector import TTLConnector
from ttlcache_connector.queue import ProgramQueue
from ttlcache_sim.gates import Gate
from ttlcache_sim.load.agents import Agent
from ttlcache_sim.settings import Cell

QUANTUM_S = 1.0
GROWTH = 2.0
LEVELS = 16
BETA = 4.0

_QUEUED = (RequestStatus.WAITING, RequestStatus.PREEMPTED)


def level_of(service_s: float) -> int:
    """Index of the queue whose range holds `service_s`."""
    if service_s < QUANTUM_S:
        return 0
    level = 1 + int(math.log(service_s / QUANTUM_S, GROWTH))
    return min(level, LEVELS - 1)


@dataclass(slots=True)
class Attained:
    """Seconds that a program's calls ran and queued, since its last promotion."""

    service_s: float = 0.0
    wait_s: float = 0.0


@dataclass(slots=True)
class _Call:
    """A program's call in the engine; programs make one at a time."""

    record: RequestRecord
    promoted_s: float | None = None
    wait_is_counted: bool = False


class PlasGate(Gate):
    """Holds no turn, but sorts the waiting queue in place of the connector's ordering.

    The queue asks `priority` and `refresh_place` of the connector; this object
    answers both.
    """

    def __init__(self, connector: TTLConnector) -> None:
        role = connector.scheduler_role
        assert role is not None
        assert role.parts.engine.scheduler is not None
        self._requests = role.parts.controller.requests
        self._queue = cast(ProgramQueue, role.parts.engine.scheduler.waiting)
        self._now_s = default_clock().now_s
        self._attained: dict[str, Attained] = {}
        self._calls: dict[str, _Call] = {}
        self._promotions: list[tuple[float, int, Request]] = []
        self._count = itertools.count()
        callbacks: Any = connector
        self._connector_moved = callbacks.refresh_place
        callbacks.priority = self.priority
        callbacks.refresh_place = self.refresh_place

    def attained(self, program_id: str) -> Attained:
        """The program's counters."""
        return self._attained.setdefault(program_id, Attained())

    def priority(self, request: Request) -> tuple[int, ...]:
        """Sort key in the waiting queue."""
        call = self._call(request)
        self._count_wait(call)
        at_s = self._promote_at_s(call)
        if at_s < math.inf:
            entry = (at_s, next(self._count), request)
            heapq.heappush(self._promotions, entry)
        resumes = request.status is RequestStatus.PREEMPTED
        return (0, not resumes, self._level(call), call.record.seq)

    def refresh_place(self, request: Request) -> bool:
        """Promotes what is due; True: the queue looks for its head anew."""
        now_s, promoted = self._now_s(), False
        while self._next_promotion_s() <= now_s:
            _, _, due = heapq.heappop(self._promotions)
            call = self._call(due)
            call.promoted_s = now_s
            self._attained[call.record.program.program_id] = Attained()
            self._queue.rekey(due.request_id)
            promoted = True
        return promoted or self._connector_moved(request)

    def finish(self, agent: Agent, now_s: float) -> list[Agent]:
        call = self._calls.pop(agent.program_id)
        self._count_wait(call)
        if call.record.admitted_s is not None and now_s > call.record.admitted_s:
            attained = self.attained(agent.program_id)
            attained.service_s += now_s - call.record.admitted_s
        if agent.is_last:
            self._attained.pop(agent.program_id, None)
        return []

    def next_tick_s(self) -> float | None:
        """A stride ends where the order changes."""
        at_s = self._next_promotion_s()
        return None if at_s == math.inf else at_s

    # --- inside ------------------------------------------------------------

    def _call(self, request: Request) -> _Call:
        record = self._requests[request.request_id]
        program_id = record.program.program_id
        call = self._calls.get(program_id)
        if call is None or call.record is not record:
            call = self._calls[program_id] = _Call(record)
        return call

    def _level(self, call: _Call) -> int:
        if call.promoted_s is not None:
            return 0
        return level_of(self.attained(call.record.program.program_id).service_s)

    def _count_wait(self, call: _Call) -> None:
        record = call.record
        if record.admitted_s is None or call.wait_is_counted:
            return
        call.wait_is_counted = True
        since_s = record.queued_s if call.promoted_s is None else call.promoted_s
        attained = self.attained(record.program.program_id)
        attained.wait_s += max(0.0, record.admitted_s - since_s)

    def _promote_at_s(self, call: _Call) -> float:
        if self._level(call) == 0:
            return math.inf
        attained = self.attained(call.record.program.program_id)
        wait_s = max(0.0, BETA * attained.service_s - attained.wait_s)
        return call.record.queued_s + wait_s

    def _next_promotion_s(self) -> float:
        """Without those that left the queue, or were promoted already."""
        while self._promotions:
            at_s, _, request = self._promotions[0]
            if request.status in _QUEUED and self._level(self._call(request)):
                return at_s
            heapq.heappop(self._promotions)
        return math.inf


def gate(cell: Cell, connector: TTLConnector | None) -> Gate:
    """As the arm has it."""
    assert connector is not None
    return PlasGate(connector)
