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
    from ttlcache_sim.load.agents import Agent

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

    def known(self, agent: Agent) -> int:
        """Tokens of the prompt that were sent there before."""
        return self.sent_tokens.get(agent.program_id, 0)

    def sent(self, agent: Agent) -> None:
        self.total_tokens += agent.prompt_tokens - self.known(agent)
        self.sent_tokens[agent.program_id] = agent.prompt_tokens


class Router(Protocol):
    """is_static: where a program goes does not depend on what goes on elsewhere."""

    is_static: bool

    def route(self, agent: Agent, replicas: Sequence[Seen]) -> Seen:
        """For the agent's next turn."""
        ...


class Session:
    """By the session's id alone (rendezvous hashing): `consistent_hash`."""

    is_static = True

    def route(self, agent: Agent, replicas: Sequence[Seen]) -> Seen:
        return max(replicas, key=lambda seen: _weight(agent.program_id, seen.index))


def _weight(program_id: str, index: int) -> bytes:
    return hashlib.sha256(f"{program_id}/{index}".encode()).digest()


class Sticky:
    """A new program to the replica with the fewest; its turns stay there."""

    is_static = False

    def __init__(self) -> None:
        self._homes: dict[str, int] = {}

    def route(self, agent: Agent, replicas: Sequence[Seen]) -> Seen:
        if agent.program_id not in self._homes:
            fewest = min(replicas, key=lambda seen: (seen.programs, seen.index))
            self._homes[agent.program_id] = fewest.index
        return replicas[self._homes[agent.program_id]]


class CacheAware:
    """Where the longest prefix was sent; least loaded while loads are out of balance.

    A prompt that shares too little with anything goes where least was sent.
    """

    is_static = False

    def route(self, agent: Agent, replicas: Sequence[Seen]) -> Seen:
        most = max(seen.in_flight for seen in replicas)
        least = min(seen.in_flight for seen in replicas)
        if (
            most - least > BALANCE_ABS_THRESHOLD
            and most > BALANCE_REL_THRESHOLD * least
        ):
            return min(replicas, key=lambda seen: (seen.in_flight, seen.index))
        best = max(replicas, key=lambda seen: (seen.known(agent), -seen.index))
        if best.known(agent) > CACHE_THRESHOLD * agent.prompt_tokens:
            return best
        return min(replicas, key=lambda seen: (seen.total_tokens, seen.index))


ROUTERS: dict[str, Callable[[], Router]] = {
    "cache-aware": CacheAware,
    "session": Session,
    "sticky": Sticky,
}
