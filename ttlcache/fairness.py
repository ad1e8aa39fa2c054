"""Where a context stands in the queue, and for how long.

Serving the oldest program first, and pinned ones before it, is right for jobs that
end. One that never ends would keep all others waiting for ever, and so would one that
spawns sub-agents without end. Hence a place belongs to a context, not to an id: a
request that continues no context stands where a newcomer stands. And a place lasts for
a quantum of turns; then the context queues up again as if it had just come. The bound
on waiting that follows is proved in docs/scheduling.md.

A quantum that most programs need more than once takes their place from all of them, and
the order is no order any more. How many turns they need is learnt. Turns, not seconds:
vLLM's own order lets one turn of every program pass a waiting request, so turns say how
much longer it waits here than there, whatever the hardware and the load.

Places are given by start-time fair queueing (Goyal, Vin, Cheng, SIGCOMM 1996) over
tenants, each new place costing one: a tenant that begins many contexts at once stands
behind the first ones of all others.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from ttlcache.estimators import SlidingMean

#: Ended programs over which the mean is taken, and below which nothing is known.
WINDOW, MIN_ENDED = 1000, 5
#: A quantum is so many times the turns of the mean program: longer programs
#: are few, or much longer than the rest, and to serve those last shortens the mean.
PROGRAMS_PER_QUANTUM = 4.0
#: A quantum has at least so many turns, also while little is known.
LEAST_TURNS = 24
#: One program counts for at most so many turns: few must not make the quantum of all.
MOST_TURNS = 256
#: Tenants remembered whose last context has not begun yet.
MAX_TENANTS = 4096


@dataclass(slots=True, eq=False)
class Place:
    """Where a context stands in the queue.

    seq: from `PlaceNumbers`; smaller is served first.
    turns: turns of it that were admitted.
    quantum_turns: of these, those in the present quantum; -1 once that is used up,
        until the next turn is admitted.
    """

    seq: int
    turns: int = 0
    quantum_turns: int = 0

    @property
    def is_used_up(self) -> bool:
        """Its quantum is used up, no turn was admitted since: a pin gives no rank."""
        return self.quantum_turns < 0

    def on_admission(self, quantum: int) -> bool:
        """A turn got its memory; True if it was the last one of a quantum.

        The caller must then give the context a new place with `move_back`.
        """
        self.turns += 1
        if self.is_used_up:
            self.quantum_turns = 0
        return self._use(quantum)

    def on_stall(self, quantum: int) -> bool:
        """The engine stood still rather than take its pin: that counts as a turn."""
        return not self.is_used_up and self._use(quantum)

    def move_back(self, seq: int) -> None:
        """Stand behind every request that has come so far."""
        self.seq = seq
        self.quantum_turns = -1

    def _use(self, quantum: int) -> bool:
        self.quantum_turns += 1
        return self.quantum_turns >= quantum


class PlaceNumbers:
    """Gives places numbers. Of one tenant alone: 1, 2, 3, …, the order of arrival."""

    def __init__(self) -> None:
        self._started = 0  # largest number of a context of which a turn was admitted
        self._last: OrderedDict[str, int] = OrderedDict()

    def next(self, tenant: str) -> int:
        """The number of a new place: behind those of its tenant, and behind those of
        other tenants that stood at the head already."""
        number = max(self._started, self._last.get(tenant, 0)) + 1
        self._last[tenant] = number
        self._last.move_to_end(tenant)
        if len(self._last) > MAX_TENANTS:
            self._last.popitem(last=False)
        return number

    def on_admission(self, place: Place) -> None:
        """A turn of the place's context got its memory."""
        self._started = max(self._started, place.seq)


class Quantum:
    """For how many turns a place lasts."""

    def __init__(self, fixed_turns: int | None = None) -> None:
        """
        Args:
            fixed_turns: None: learnt from programs that ended.
        """
        self._fixed_turns = fixed_turns
        self._turns = SlidingMean(WINDOW)

    def on_program_end(self, place: Place) -> None:
        """A program is over. One-shot requests say nothing of how long programs are."""
        if place.turns > 1:
            self._turns.observe(min(place.turns, MOST_TURNS))

    @property
    def turns(self) -> int:
        if self._fixed_turns is not None:
            return self._fixed_turns
        if self._turns.count < MIN_ENDED:
            return LEAST_TURNS
        return max(LEAST_TURNS, round(PROGRAMS_PER_QUANTUM * self._turns.value))
