"""Which replica a turn goes to: a router's policies, as it sees a fleet.

A router knows what it sent where and what came back, nothing of blocks. Rules and
defaults of `cache-aware` are those of vllm-router 0.1 (`--cache-threshold`,
`--balance-abs-threshold`, `--balance-rel-threshold`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from bench.sim.load.agents import Agent

CACHE_THRESHOLD = 0.3
BALANCE_ABS_THRESHOLD = 64
BALANCE_REL_THRESHOLD = 1.5


@dataclass(slots=True)
class Seen:
    """A replica, seen from the router.

    in_flight: turns sent to it that have not come back.
    programs: those that were sent there last and have not ended.
    sent_tokens: of each program, how much of its context was sent there.
    total_tokens: sum of them, ended programs included.
    """

    index: int
    in_flight: int = 0
    programs: int = 0
    sent_tokens: dict[str, int] = field(default_factory=dict)
    total_tokens: int = 0

    def sent(self, agent: Agent) -> None:
        before = self.sent_tokens.get(agent.program_id, 0)
        self.sent_tokens[agent.program_id] = agent.prompt_tokens
        self.total_tokens += agent.prompt_tokens - before


class Router(Protocol):
    """is_static: where a program goes does not depend on what goes on elsewhere."""

    is_static: bool

    def route(self, agent: Agent, alive: Sequence[Seen]) -> Seen:
        """For the agent's next turn; `alive` is never empty."""
        ...


class RoundRobin:
    """Turn by turn to the next one."""

    is_static = False

    def __init__(self) -> None:
        self._turns = 0

    def route(self, agent: Agent, alive: Sequence[Seen]) -> Seen:
        self._turns += 1
        return alive[(self._turns - 1) % len(alive)]


class Session:
    """By the session's id alone (rendezvous hashing): `consistent_hash`.

    A replica that dies moves its own sessions and nobody else's.
    """

    is_static = True

    def route(self, agent: Agent, alive: Sequence[Seen]) -> Seen:
        return max(alive, key=lambda seen: _weight(agent.program_id, seen.index))


def _weight(program_id: str, index: int) -> bytes:
    return hashlib.sha256(f"{program_id}/{index}".encode()).digest()


class Sticky:
    """A new program to the replica with the fewest; its turns stay there."""

    is_static = False

    def __init__(self) -> None:
        self._homes: dict[str, int] = {}

    def route(self, agent: Agent, alive: Sequence[Seen]) -> Seen:
        home = self._homes.get(agent.program_id)
        for seen in alive:
            if seen.index == home:
                return seen
        chosen = min(alive, key=lambda seen: (seen.programs, seen.index))
        self._homes[agent.program_id] = chosen.index
        return chosen


class LeastLoaded:
    """To the replica with the fewest turns in flight."""

    is_static = False

    def route(self, agent: Agent, alive: Sequence[Seen]) -> Seen:
        return min(alive, key=lambda seen: (seen.in_flight, seen.index))


class CacheAware:
    """Where the longest prefix was sent; least loaded while loads are out of balance.

    A prompt that shares too little with anything goes where least was sent.
    """

    is_static = False

    def route(self, agent: Agent, alive: Sequence[Seen]) -> Seen:
        most = max(seen.in_flight for seen in alive)
        least = min(seen.in_flight for seen in alive)
        if (
            most - least > BALANCE_ABS_THRESHOLD
            and most > BALANCE_REL_THRESHOLD * least
        ):
            return LeastLoaded().route(agent, alive)
        best = max(alive, key=lambda seen: (_known(agent, seen), -seen.index))
        if _known(agent, best) > CACHE_THRESHOLD * agent.prompt_tokens:
            return best
        return min(alive, key=lambda seen: (seen.total_tokens, seen.index))


def _known(agent: Agent, seen: Seen) -> int:
    """Tokens of the prompt that were sent there before."""
    own = seen.sent_tokens.get(agent.program_id, 0)
    shared = agent.shared_tokens if seen.sent_tokens else 0
    return min(max(own, shared), agent.prompt_tokens)


ROUTERS: dict[str, Callable[[], Router]] = {
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
    "cache-aware": CacheAware,
    "session": Session,
    "sticky": Sticky,
}
