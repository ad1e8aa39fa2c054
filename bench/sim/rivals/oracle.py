"""A gate and an order that know every program's future. A reference point, no bound.

A program is let in when what it will hold fits beside what those inside will hold,
the one with the least tokens x seconds left first; once in it stays in. What a program
holds lies `FOOTPRINT_SHARE` of the way from its context now to that at its end, and is
nothing while a tool runs that takes longer than a prefill of that context. Inside the
least work left goes first (shortest remaining processing time), claims and pins
included.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from bench.sim.rivals.ablations import cost_if_tier_keeps_all
from ttlcache.estimators.costs import RebuildCost
from ttlcache.policies.adaptive import Adaptive, Terms
from ttlcache.policies.base import View
from ttlcache.policies.cachettl import bounded
from ttlcache.scheduling.ordering import Ordering, PriorityKey, QueuedTurn
from ttlcache.types import Rank, TurnFacts
from ttlcache_sim.gates import Gate

if TYPE_CHECKING:  # they import vLLM, or the arms, and the policy does not
    from ttlcache_connector.connector import TTLConnector
    from ttlcache_sim.load.agents import Agent
    from ttlcache_sim.settings import Cell


#: By trial: 0.5 lets too many in, 1.0 too few.
FOOTPRINT_SHARE = 0.7


class OracleGate(Gate):
    """Holds new programs; turns of those that are in pass."""

    def __init__(
        self,
        capacity_tokens: int,
        work_s: Callable[[Agent], float],
        token_s: float,
    ) -> None:
        """
        Args:
            work_s: what a program still costs alone on the engine.
            token_s: seconds that the prefill of a token takes.
        """
        self._capacity = capacity_tokens
        self._work_s = work_s
        self._token_s = token_s
        self._inside: dict[str, Agent] = {}
        self._away: set[str] = set()  # in a gap too long to hold their context
        self._waiting: list[Agent] = []

    def arrive(self, agent: Agent, now_s: float) -> list[Agent]:
        if agent.program_id in self._inside:
            self._away.discard(agent.program_id)
            return [agent]
        self._waiting.append(agent)
        return self._let_in()

    def finish(self, agent: Agent, now_s: float) -> list[Agent]:
        if agent.is_last:
            del self._inside[agent.program_id]
        elif agent.current.gap_s > self._token_s * agent.prompt_tokens:
            self._away.add(agent.program_id)
        return self._let_in()

    def _let_in(self) -> list[Agent]:
        if not self._waiting:
            return []
        self._waiting.sort(key=self._token_seconds)
        room = self._capacity - sum(
            _footprint(agent)
            for program_id, agent in self._inside.items()
            if program_id not in self._away
        )
        entered = []
        for agent in self._waiting:
            if _footprint(agent) <= room or not self._inside:
                room -= _footprint(agent)
                self._inside[agent.program_id] = agent
                entered.append(agent)
        for agent in entered:
            self._waiting.remove(agent)
        return entered

    def _token_seconds(self, agent: Agent) -> float:
        gaps_s = sum(turn.gap_s for turn in agent.program.turns[agent.turn :])
        return (self._work_s(agent) + gaps_s) * _footprint(agent)


def _footprint(agent: Agent) -> float:
    prompt, output = agent.remaining_tokens()
    return agent.context_tokens + FOOTPRINT_SHARE * (prompt + output)


class ShortestRemaining(Ordering):
    """Least true work left, which the bench tells as user priority."""

    name = "srpt"

    def key(self, turn: QueuedTurn) -> PriorityKey:
        # The user's priority goes before it.
        return (not turn.preempted, not turn.claimable, *self.rank(turn))

    def rank(self, turn: QueuedTurn) -> Rank:
        return (turn.queue_place, turn.request_seq)


class OraclePolicy(Adaptive):
    """`adaptive` told each gap's length: holds for that long where it is worth it.

    Pins go as a whole and the lower tier is believed to keep everything, beside the
    steps of others: a reference must not move with what `adaptive` learns.
    """

    name = "adaptive-oracle"
    ETA_MARGIN = 1.01
    MIN_KEEP_SHARE = 1.0

    def _rebuild_cost(self, turn: TurnFacts, view: View) -> RebuildCost:
        return cost_if_tier_keeps_all(turn, view)

    def _terms(self, turn: TurnFacts, view: View, rebuild: RebuildCost) -> Terms:
        terms = super()._terms(turn, view, rebuild)
        num_waiting = view.pressure.num_waiting
        if not rebuild.reload_s or num_waiting <= 0:
            return terms
        # A reload delays its own program, and others by the memory that it takes.
        benefit_s = (1.0 / num_waiting + terms.price) * rebuild.reload_s
        return terms._replace(benefit_s=bounded(benefit_s))


def gate(cell: Cell, connector: TTLConnector | None) -> Gate:
    """As the arm has it."""
    step_time = cell.engine.step_time
    return OracleGate(
        cell.engine.pool_tokens,
        lambda agent: step_time.work_s(*agent.remaining_tokens()),
        step_time.token_s,
    )
