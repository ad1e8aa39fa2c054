"""ThunderAgent (arXiv 2602.13692): pause and restore programs by their working set.

A proxy before plain vLLM. Every 5 s:

    load = sum over reasoning of c + sum over acting of c * 2^(-t), t in seconds,
           plus 100 tokens a program
    load > capacity: pause, acting before reasoning, shortest first, until it fits;
                     a reasoning program is counted out at once and pauses at the end
                     of its turn
    else:            restore, those with a request ready first, then new programs,
                     then acting ones, shortest first, while the load fits

A new program is let in at once if nobody is paused and it fits, else it is paused.
After 30 min a paused program is resumed by force. c is the prompt of the turn under
way, or the context it left; the published proxy estimates it from characters.

Confidence: medium. Rule and constants are those of paper and code as described; one
engine here, so its packing over several is left out. New programs are restored after
returning ones; in the published proxy the shortest goes first among both.
"""

from __future__ import annotations

from dataclasses import dataclass

from ttlcache_connector.connector import TTLConnector
from ttlcache_sim.gates import Gate
from ttlcache_sim.load.agents import Agent
from ttlcache_sim.settings import Cell

TICK_S = 5.0
BUFFER_TOKENS = 100
FORCE_RESUME_S = 1800.0


@dataclass(slots=True)
class _Program:
    agent: Agent
    tokens: int
    acting_since_s: float | None = None  # None: reasoning, or ready to
    paused_since_s: float | None = None
    leaves: bool = False  # marked while reasoning: pauses at its turn's end
    waiting: bool = False  # its next turn is held here

    @property
    def is_new(self) -> bool:
        return self.agent.turn == 0


class ThunderAgentGate(Gate):
    """Holds the turns of paused programs."""

    def __init__(self, capacity_tokens: int) -> None:
        self._capacity = capacity_tokens
        self._programs: dict[str, _Program] = {}
        self._next_tick_s = TICK_S

    def arrive(self, agent: Agent, now_s: float) -> list[Agent]:
        program = self._programs.get(agent.program_id)
        if program is None:
            return self._arrive_new(agent, now_s)
        program.tokens = agent.prompt_tokens
        program.acting_since_s = None
        if program.paused_since_s is None:
            return [agent]
        program.waiting = True
        program.paused_since_s = now_s  # the time-out counts from the request
        return []

    def finish(self, agent: Agent, now_s: float) -> list[Agent]:
        program = self._programs[agent.program_id]
        if agent.is_last:
            del self._programs[agent.program_id]
            return []
        program.tokens = agent.prompt_tokens + agent.current.output_tokens
        program.acting_since_s = now_s
        if program.leaves:
            program.leaves = False
            program.paused_since_s = now_s
        return []

    def tick(self, now_s: float) -> list[Agent]:
        if now_s < self._next_tick_s:
            return []
        self._next_tick_s = now_s + TICK_S
        resumed = self._force(now_s)
        if self._load(now_s) > self._capacity:
            self._pause(now_s)
            return resumed
        return resumed + self._restore(now_s)

    def next_s(self) -> float | None:
        waits = any(program.waiting for program in self._programs.values())
        return self._next_tick_s if waits else None

    def next_tick_s(self) -> float | None:
        return self._next_tick_s

    # --- inside ------------------------------------------------------------

    def _arrive_new(self, agent: Agent, now_s: float) -> list[Agent]:
        program = _Program(agent, agent.prompt_tokens)
        room = self._capacity - self._load(now_s)
        nobody_paused = all(p.paused_since_s is None for p in self._programs.values())
        self._programs[agent.program_id] = program
        if nobody_paused and program.tokens + BUFFER_TOKENS <= room:
            return [agent]
        program.paused_since_s, program.waiting = now_s, True
        return []

    def _load(self, now_s: float) -> float:
        total = 0.0
        for program in self._programs.values():
            if program.paused_since_s is not None or program.leaves:
                continue
            decay = 1.0
            if program.acting_since_s is not None:
                decay = 2.0 ** (program.acting_since_s - now_s)
            total += program.tokens * decay + BUFFER_TOKENS
        return total

    def _pause(self, now_s: float) -> None:
        active = [
            p
            for p in self._programs.values()
            if p.paused_since_s is None and not p.leaves
        ]
        active.sort(key=lambda p: (p.acting_since_s is None, p.tokens))
        for program in active:
            if self._load(now_s) <= self._capacity:
                return
            if program.acting_since_s is None:
                program.leaves = True
            else:
                program.paused_since_s = now_s

    def _restore(self, now_s: float) -> list[Agent]:
        paused = [p for p in self._programs.values() if p.paused_since_s is not None]
        paused.sort(key=lambda p: (not p.waiting, p.is_new, p.tokens))
        room = self._capacity - self._load(now_s)
        resumed: list[Agent] = []
        for program in paused:
            needed = program.tokens + BUFFER_TOKENS
            if needed <= room:
                room -= needed
                resumed += self._resume(program)
        return resumed

    def _force(self, now_s: float) -> list[Agent]:
        overdue = [
            p
            for p in self._programs.values()
            if p.waiting
            and p.paused_since_s is not None
            and now_s - p.paused_since_s >= FORCE_RESUME_S
        ]
        return [agent for program in overdue for agent in self._resume(program)]

    @staticmethod
    def _resume(program: _Program) -> list[Agent]:
        program.paused_since_s = None
        released = [program.agent] if program.waiting else []
        program.waiting = False
        return released


def gate(cell: Cell, connector: TTLConnector | None) -> Gate:
    """As the arm has it."""
    return ThunderAgentGate(cell.engine.pool_tokens)
