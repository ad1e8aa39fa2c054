"""MORI (arXiv 2606.00866): tiers by idleness. No code is published.

    idleness = T_act / (T_reason + T_act) over the last 5 cycles, the scheduler's
               wait excluded, the running call included

Programs are members of the GPU, the CPU, or of nothing (waiting); each tier's members
fit into it. Every 5 s members that outgrew the GPU go down, the most idle first:
acting ones at once, reasoning ones at the end of their turn. A program whose request
is ready comes up, those of the CPU tier before waiting ones and the least idle first,
when there is room or when demoting acting members that are more idle makes room: at
the tick, when it arrives and nobody waits before it, and when a program ends. A new
program comes into free room only.
Members' KV is pinned; whoever goes down is unpinned and evicted like anything else
(and is in the CPU tier by then, where there is one).

Ours, where the description is silent: waiting programs come up in order of arrival
(a new one has no idleness, and displaces nobody); `STICKY` by which a member must be
more idle than who wants in; capacity counts whole contexts. Left out: its order of
eviction inside a tier by the kind of program (the simulated CPU tier is LRU),
prefetching, several replicas.

Confidence: low. Checked against a description of the paper, with no code to compare
and no published number reproduced; take its results as those of the idea.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from ttlcache.clock import default_clock
from ttlcache.retention.pin_table import PinTable
from ttlcache.scheduling.ordering import RequestFCFS
from ttlcache_connector.connector import TTLConnector
from ttlcache_sim.gates import Gate, controller_of
from ttlcache_sim.load.agents import Agent
from ttlcache_sim.settings import Cell
from ttlcache_sim.tiers.link import current_store

TICK_S = 5.0
CYCLES = 5
STICKY = 0.1
#: A context that grows while it decodes needs some room above its prompt.
BUFFER_TOKENS = 256


class RequestOrder(RequestFCFS):
    """vLLM's, without our own rule: in that order requests take no member's pin."""


@dataclass(slots=True)
class _Program:
    agent: Agent
    seq: int
    tokens: int
    tier: str = "waiting"
    acting_since_s: float | None = None
    waiting: bool = False  # its next turn is held here
    leaves: bool = False  # goes down at the end of its turn
    cycles: deque[tuple[float, float]] = field(
        default_factory=lambda: deque(maxlen=CYCLES)
    )
    reason_s: float = 0.0

    def idleness(self, now_s: float) -> float:
        reason_s = sum(r for r, _ in self.cycles)
        act_s = sum(a for _, a in self.cycles)
        if self.acting_since_s is not None:
            reason_s += self.reason_s
            act_s += now_s - self.acting_since_s
        total_s = reason_s + act_s
        return act_s / total_s if total_s else 0.0


def unpin(pins: PinTable, program_id: str, now_s: float) -> None:
    """End a program's pins with the next step."""
    for pin in list(pins):
        if pin.program.program_id == program_id:
            # Asked again at the deadline, the policy would hold on for ever.
            pin.turn.facts = None
            pins.set_deadline(pin, now_s)


class MoriGate(Gate):
    """Holds the turns of programs that are not members of the GPU tier."""

    def __init__(
        self,
        gpu_tokens: int,
        cpu_tokens: int,
        unpin: Callable[[str], None],
    ) -> None:
        """
        Args:
            unpin: drops the pin of a program's last turn.
        """
        self._gpu_tokens = gpu_tokens
        self._cpu_tokens = cpu_tokens
        self._unpin = unpin
        self._programs: dict[str, _Program] = {}
        self._next_tick_s = TICK_S

    def arrive(self, agent: Agent, now_s: float) -> list[Agent]:
        program = self._programs.get(agent.program_id)
        if program is None:
            program = _Program(agent, agent.index, agent.prompt_tokens)
            self._programs[agent.program_id] = program
        if program.acting_since_s is not None:
            program.cycles.append((program.reason_s, now_s - program.acting_since_s))
            program.acting_since_s = None
        program.tokens = agent.prompt_tokens
        if program.tier == "gpu":
            return [agent]
        program.waiting = True
        others_wait = any(p.waiting for p in self._programs.values() if p != program)
        return [] if others_wait else self._promote(now_s)

    def finish(self, agent: Agent, now_s: float) -> list[Agent]:
        program = self._programs[agent.program_id]
        if agent.is_last:
            del self._programs[agent.program_id]
            return self._promote(now_s)
        program.tokens = agent.prompt_tokens + agent.current.output_tokens
        program.acting_since_s, program.reason_s = now_s, agent.service_s
        if program.leaves:
            self._demote(program)
        return []

    def tick(self, now_s: float) -> list[Agent]:
        if now_s < self._next_tick_s:
            return []
        self._next_tick_s = now_s + TICK_S
        self._shed(now_s)
        return self._promote(now_s)

    def next_s(self) -> float | None:
        waits = any(program.waiting for program in self._programs.values())
        return self._next_tick_s if waits else None

    def next_tick_s(self) -> float | None:
        return self._next_tick_s

    # --- inside ------------------------------------------------------------

    def _members(self, tier: str) -> list[_Program]:
        return [p for p in self._programs.values() if p.tier == tier]

    def _room(self) -> int:
        used = sum(
            p.tokens + BUFFER_TOKENS for p in self._members("gpu") if not p.leaves
        )
        return self._gpu_tokens - used

    def _shed(self, now_s: float) -> None:
        members = [p for p in self._members("gpu") if not p.leaves]
        members.sort(key=lambda p: -p.idleness(now_s))
        for program in members:
            if self._room() >= 0:
                return
            self._go_down(program)

    def _go_down(self, program: _Program) -> None:
        if program.acting_since_s is None:
            program.leaves = True
        else:
            self._demote(program)

    def _demote(self, program: _Program) -> None:
        program.leaves = False
        self._unpin(program.agent.program_id)
        used = sum(p.tokens for p in self._members("cpu"))
        fits = used + program.tokens <= self._cpu_tokens
        program.tier = "cpu" if fits else "waiting"

    def _promote(self, now_s: float) -> list[Agent]:
        ready = [p for p in self._programs.values() if p.waiting]
        ready.sort(
            key=lambda p: (
                p.tier != "cpu",
                p.idleness(now_s) if p.tier == "cpu" else 0.0,
                p.seq,
            )
        )
        released: list[Agent] = []
        for program in ready:
            if not self._make_room(program, now_s):
                continue
            program.tier, program.waiting = "gpu", False
            released.append(program.agent)
        return released

    def _make_room(self, program: _Program, now_s: float) -> bool:
        needed = program.tokens + BUFFER_TOKENS
        if not program.cycles:  # how idle a new one will be is not known
            return self._room() >= needed or not self._members("gpu")
        bound = program.idleness(now_s) + STICKY
        idle = [
            p
            for p in self._members("gpu")
            if p.acting_since_s is not None and p.idleness(now_s) > bound
        ]
        idle.sort(key=lambda p: -p.idleness(now_s))
        gain = sum(p.tokens + BUFFER_TOKENS for p in idle)
        if self._room() + gain < needed:
            return not self._members("gpu")  # alone it always fits
        for victim in idle:
            if self._room() >= needed:
                break
            self._demote(victim)
        return True


def gate(cell: Cell, connector: TTLConnector | None) -> Gate:
    """As the arm has it."""
    pins, store = controller_of(connector).pins, current_store()
    return MoriGate(
        cell.engine.pool_tokens,
        store.cpu.capacity_tokens if store is not None else 0,
        lambda program_id: unpin(pins, program_id, default_clock().now_s()),
    )
