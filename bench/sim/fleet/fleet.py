"""Many replicas in one virtual time: a router before engines that know nothing of it.

The replica whose clock is behind goes next, so no turn comes much before or after its
time: where a turn of one replica depends on another's, a stride is at most
`MAX_LEAD_S` long. With a static router replicas have nothing to do with each other.

    programs → router → replica: gate-less `Simulation` → turn done → router → …
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from typing import Any

from bench.sim.fleet.routing import Router, Seen
from ttlcache_sim.checks import SimulationError
from ttlcache_sim.engine import Simulation
from ttlcache_sim.events import EventQueue
from ttlcache_sim.load.agents import Agent
from ttlcache_sim.load.workload import Workload

#: Of replicas with a router that looks at all of them: how far one may be ahead.
MAX_LEAD_S = 0.25


class Replica(Simulation):
    """An engine whose turns come from outside and go back there."""

    def __init__(self, *args: Any, seen: Seen, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen = seen
        self.until_s = math.inf
        self.done: list[tuple[Agent, float]] = []

    def send(self, agent: Agent, time_s: float) -> None:
        """A turn of `agent` comes at `time_s`, or now if that is past."""
        self._expect(agent, time_s)

    def next_s(self) -> float:
        """When it wants to go on; infinite where it has nothing to do."""
        if self._live:
            return self._clock.now_s()
        due_s = self._arrivals.next_s()
        return math.inf if due_s is None else max(due_s, self._clock.now_s())

    def _events_s(self) -> list[float | None]:
        return [*super()._events_s(), self.until_s]

    def _send(self, agent: Agent, time_s: float) -> None:
        self.done.append((agent, time_s))

    def _program_ended(self, agent: Agent, now_s: float) -> None:
        self.done.append((agent, math.inf))


class Fleet:
    """All replicas until every program has finished.

    moved: turns that came to another replica than the turn before.
    """

    def __init__(
        self,
        make_replica: Callable[[Seen], Replica],
        size: int,
        workload: Workload,
        router: Router,
    ) -> None:
        self.replicas = [make_replica(Seen(index)) for index in range(size)]
        self._router = router
        self._homes: dict[str, int] = {}
        self._left = len(workload.programs)
        self.moved = self.turns = 0
        self._starts: EventQueue[Agent] = EventQueue()
        for index, program in enumerate(workload.programs):
            self._starts.push(program.arrival_s, Agent(index, program))

    def run(self) -> None:
        """Serve all programs.

        Raises:
            SimulationError: a replica is stuck.
        """
        heap: list[tuple[float, int]] = []
        self._wake: Callable[[int], None] = lambda index: heapq.heappush(
            heap, (self.replicas[index].next_s(), index)
        )
        if self._router.is_static:
            # Nobody's clock stands for the others': a stride may go past a start.
            while (due := self._starts.pop_due(math.inf)) is not None:
                self._route(due[1], due[0])
        while self._left:
            while heap and heap[0][0] != self.replicas[heap[0][1]].next_s():
                heapq.heappop(heap)  # it went on meanwhile
            replica_s = heap[0][0] if heap else math.inf
            start_s = self._starts.next_s()
            event_s = math.inf if start_s is None else start_s
            if event_s <= replica_s:
                if event_s == math.inf:
                    raise SimulationError(
                        f"{self._left} programs are left and nobody has any to serve"
                    )
                due = self._starts.pop_due(event_s)
                assert due is not None
                self._route(due[1], event_s)
                continue
            self._advance(self.replicas[heapq.heappop(heap)[1]], event_s)

    def _advance(self, replica: Replica, event_s: float) -> None:
        lead_s = math.inf if self._router.is_static else MAX_LEAD_S
        limit_s = math.inf if self._router.is_static else event_s
        replica.until_s = min(limit_s, replica.next_s() + lead_s)
        replica.advance()
        for agent, time_s in replica.done:
            replica.seen.in_flight -= 1
            if time_s == math.inf:
                self._left -= 1
                home = self._homes[agent.program_id]
                self.replicas[home].seen.programs -= 1
                for each in self.replicas:
                    each.seen.sent_tokens.pop(agent.program_id, None)
            else:
                self._route(agent, time_s)
        replica.done.clear()
        self._wake(replica.seen.index)

    def _route(self, agent: Agent, time_s: float) -> None:
        """The turn comes at `time_s`; where to is decided now."""
        chosen = self._router.route(agent, [each.seen for each in self.replicas])
        home = self._homes.get(agent.program_id)
        self.turns += 1
        if home != chosen.index:
            self.moved += home is not None
            if home is not None:
                self.replicas[home].seen.programs -= 1
            chosen.programs += 1
            self._homes[agent.program_id] = chosen.index
        chosen.in_flight += 1
        chosen.sent(agent)
        self.replicas[chosen.index].send(agent, time_s)
        self._wake(chosen.index)


def load_imbalance(busy_s: Sequence[float]) -> float:
    """Of the busiest replica, over the mean."""
    return max(busy_s) * len(busy_s) / sum(busy_s)
