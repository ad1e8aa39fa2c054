"""How long a program keeps its place in the program order.

Serving the oldest program first, and pinned ones before it, is right for jobs that
end. One that never ends would keep everybody else waiting for ever, and so would one
that spawns sub-agents without end. Hence a place lasts for a quantum of service;
then the family queues up again as if it had just come. The bound on waiting that
follows is proved in docs/scheduling.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Seniority:
    """The place of one family: a program and the sub-agents that stand with it.

    seq: arrival number that it stands at; smaller is served first.
    used_s: seconds that its requests ran since the quantum began; infinite once that
        is used up, until a turn is admitted. (One exists per program: no more fields.)
    """

    seq: int
    used_s: float = 0.0

    @property
    def is_spent(self) -> bool:
        """The quantum is used up, no turn was admitted since: claims are no class."""
        return self.used_s == math.inf

    def charge(self, seconds: float, quantum_s: float) -> bool:
        """A request of the family ran; True when that used up the quantum.

        The caller must then give the family a new place with `requeue`.
        """
        if self.is_spent:
            return False
        self.used_s += seconds
        return self.used_s >= quantum_s

    def requeue(self, seq: int) -> None:
        """Stand behind everybody who has come so far."""
        self.seq = seq
        self.used_s = math.inf

    def on_admission(self) -> None:
        """A turn got its memory: a spent family's next quantum begins."""
        if self.is_spent:
            self.used_s = 0.0
