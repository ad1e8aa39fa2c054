"""When programs start: by the clock, one for each that ended, or batch by batch.

poisson           at `arrival_s`
closed:N          N at once, then one whenever one ends
rollout:N:K       N at once, the next N when K % of them have ended: a step of
                  reinforcement learning, whose weight update empties the cache
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # it imports vLLM, and a workload must not
    from ttlcache_sim.load.agents import Agent


@dataclass(frozen=True, slots=True)
class Loop:
    """What `arrivals` says of a loop. size: programs that start at once.

    share: part of a batch that has to end before the next one starts; 0: one starts
        whenever one ends.
    """

    size: int
    share: float = 0.0


def parse_loop(arrivals: str) -> Loop | None:
    """The loop of "closed:N" or "rollout:N:K", None for an open one.

    Raises:
        ValueError: numbers that mean nothing.
    """
    kind, *numbers = arrivals.split(":")
    if kind not in ("closed", "rollout"):
        return None
    wanted = {"closed": "closed:N", "rollout": "rollout:N:K"}[kind]
    if len(numbers) != wanted.count(":") or not all(n.isdigit() for n in numbers):
        raise ValueError(f"arrivals {arrivals!r}: expected {wanted}")
    size, *percent = map(int, numbers)
    if size < 1 or not all(0 < p <= 100 for p in percent):
        raise ValueError(
            f"arrivals {arrivals!r}: expected {wanted}, N >= 1 and 0 < K <= 100"
        )
    return Loop(size, percent[0] / 100.0 if percent else 0.0)


class Feed:
    """Hands out the programs of one cell."""

    def __init__(self, agents: Sequence[Agent], loop: Loop | None) -> None:
        size = loop.size if loop is not None else len(agents)
        self._share = loop.share if loop is not None else 0.0
        self._size = size
        self._later = list(agents[size:])
        self._ended = 0
        self.first = list(agents[:size])
        self.steps = 0  # batches that were replaced by the next one, or are done
        self._of_batch = {agent.program_id for agent in self.first}

    def ended(self, agent: Agent) -> list[Agent]:
        """A program ended: those that start now. `steps` tells of a new batch."""
        if not self._share:
            return [self._later.pop(0)] if self._later else []
        # Stragglers of an older batch do not count: their step is over.
        self._ended += agent.program_id in self._of_batch
        if self._ended < math.ceil(self._share * len(self._of_batch)):
            return []
        if not self._of_batch:
            return []
        self.steps += 1
        self._ended = 0
        batch, self._later = self._later[: self._size], self._later[self._size :]
        self._of_batch = {each.program_id for each in batch}
        return batch
