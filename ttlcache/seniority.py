"""How long a program keeps its place in the program order.

Serving the oldest program first, and pinned ones before it, is right for jobs that
end. One that never ends would keep everybody else waiting for ever, and so would one
that spawns sub-agents without end. Hence a place lasts for a quantum of service;
then the family queues up again as if it had just come. The bound on waiting that
follows is proved in docs/scheduling.md.

A quantum that most programs need more than once takes their place from everybody, and
the order is no order any more. How long they need depends on the model, the hardware
and the load, so it is learnt.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ttlcache.config import TTLCacheConfig
from ttlcache.estimators import SlidingMean

#: Ended programs over which the mean is taken, and below which nothing is known.
WINDOW, MIN_ENDED = 1000, 5


@dataclass(slots=True, eq=False)
class Seniority:
    """The place of one family: a program and the sub-agents that stand with it.

    seq: arrival number that it stands at; smaller is served first.
    served_s: seconds that its requests ran in all.
    began_s: of these, those before its quantum began; infinite once that is used up,
        until a turn is admitted. (One object exists per program: no more fields, and
        this one is mostly 0.0 or another's value, which costs no object.)
    """

    seq: int
    served_s: float = 0.0
    began_s: float = 0.0

    @property
    def is_spent(self) -> bool:
        """The quantum is used up, no turn was admitted since: claims are no class."""
        return self.began_s == math.inf

    def charge(self, seconds: float, quantum_s: float) -> bool:
        """A request of the family ran; True when that used up the quantum.

        The caller must then give the family a new place with `requeue`.
        """
        self.served_s += seconds
        return not self.is_spent and self.served_s - self.began_s >= quantum_s

    def requeue(self, seq: int) -> None:
        """Stand behind everybody who has come so far."""
        self.seq = seq
        self.began_s = math.inf

    def on_admission(self) -> None:
        """A turn got its memory: a spent family's next quantum begins."""
        if self.is_spent:
            self.began_s = self.served_s


class Quantum:
    """For how much service a place lasts: three times what a program takes, say.

    Programs longer than that are few, or much longer than the rest: to serve them last
    costs little, or is what shortens the mean.
    """

    def __init__(self, least_s: float, services: float, most_s: float) -> None:
        """
        Args:
            least_s: also while little is known.
            services: it is as long as so many mean services of ended programs.
            most_s: but no longer, so that waits stay bounded; `least_s` goes before it.
        """
        self._least_s = least_s
        self._services = services
        self._most_s = most_s
        self._served_s = SlidingMean(WINDOW)

    @classmethod
    def of(cls, config: TTLCacheConfig) -> Quantum:
        return cls(
            config.seniority_quantum_s,
            config.seniority_services,
            config.max_queue_wait_s,
        )

    def ended(self, seniority: Seniority) -> None:
        """A family is over."""
        if seniority.served_s > 0.0:
            # Else one of many requests at once would make everybody's quantum.
            self._served_s.observe(min(seniority.served_s, self._most_s))

    @property
    def seconds(self) -> float:
        if self._served_s.count < MIN_ENDED:
            return self._least_s
        wanted_s = self._services * self._served_s.value
        return max(self._least_s, min(wanted_s, self._most_s))
