"""llm-d-router's draft `thunder-agent` plugin (issue 2964, PR 3076), for one engine.

Every session inside counts with its whole context, running or idle, and its turns
pass. Others wait: those that were inside before new ones, each list first come first
served; one that does not fit does not hold up smaller ones. A session that waits takes
the room of sessions idle for `LEASE_S`, the longest idle first; they wait with their
next turn. After 30 min one is let in by force.

Confidence: medium, from the plugin's description. Tokens are exact here.
"""

from __future__ import annotations

from dataclasses import dataclass

from ttlcache_connector.connector import TTLConnector
from ttlcache_sim.gates import Gate
from ttlcache_sim.load.agents import Agent
from ttlcache_sim.settings import Cell

LEASE_S = 30.0
FORCE_S = 1800.0


@dataclass(slots=True)
class _Session:
    agent: Agent
    since_s: float  # idle, if it is inside; waiting, if it is not
    tokens: int
    idle: bool = False


class SessionLeaseGate(Gate):
    """Holds the turns of sessions that have no room."""

    def __init__(self, capacity_tokens: int) -> None:
        self._capacity = capacity_tokens
        self._inside: dict[str, _Session] = {}
        self._waiting: list[_Session] = []
        self._now_s = 0.0

    def arrive(self, agent: Agent, now_s: float) -> list[Agent]:
        session = _Session(agent, now_s, agent.prompt_tokens)
        if agent.program_id in self._inside:
            self._inside[agent.program_id] = session
            self._make_room(0, now_s)
            return [agent]
        self._waiting.append(session)
        return self.tick(now_s)

    def finish(self, agent: Agent, now_s: float) -> list[Agent]:
        tokens = agent.prompt_tokens + agent.current.output_tokens
        self._inside[agent.program_id] = _Session(agent, now_s, tokens, idle=True)
        if agent.is_last:
            del self._inside[agent.program_id]
        return self.tick(now_s)

    def tick(self, now_s: float) -> list[Agent]:
        self._now_s = now_s
        self._waiting.sort(key=lambda s: (s.agent.turn == 0, s.since_s))
        entered = []
        for session in list(self._waiting):
            overdue = now_s >= session.since_s + FORCE_S
            if self._make_room(session.tokens, now_s) or overdue:
                self._waiting.remove(session)
                self._inside[session.agent.program_id] = session
                entered.append(session.agent)
        return entered

    def next_s(self) -> float | None:
        times = [s.since_s + FORCE_S for s in self._waiting]
        if times:
            times += [s.since_s + LEASE_S for s in self._inside.values() if s.idle]
        return min((time_s for time_s in times if time_s > self._now_s), default=None)

    next_tick_s = next_s

    def _make_room(self, tokens: int, now_s: float) -> bool:
        """Pauses nobody if that would not do."""
        room = self._capacity - sum(s.tokens for s in self._inside.values())
        idle = [s for s in self._inside.values() if s.idle]
        overdue = sorted(
            (s for s in idle if now_s >= s.since_s + LEASE_S), key=lambda s: s.since_s
        )
        if room + sum(s.tokens for s in overdue) < tokens:
            return False
        for session in overdue:
            if room >= tokens:
                break
            del self._inside[session.agent.program_id]
            room += session.tokens
        return True


def gate(cell: Cell, connector: TTLConnector | None) -> Gate:
    """As the arm has it."""
    return SessionLeaseGate(cell.engine.pool_tokens)
