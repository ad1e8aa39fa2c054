"""Where a context stands in the queue, and for how long.

Serving the oldest program first, and pinned ones before it, is right for jobs that
end. One that never ends would keep all others waiting for ever, and so would one that
spawns sub-agents without end. Hence a place belongs to a context, not to an id: a
request that continues no context stands where a newcomer stands. And a place lasts for
a quantum of service; then the context queues up again as if it had just come. The bound
on waiting that follows is proved in docs/research/scheduling-proof.md.

A quantum that most programs need more than once takes their place from all of them, and
the order is no order any more. How much they need depends on the model, the hardware
and the load, so it is learnt, in seconds and turns, as some clients' are short. It is
some turns at least, whatever they take: vLLM's order lets one of each program pass.

Places are given by start-time fair queueing (Goyal, Vin, Cheng, SIGCOMM 1996) over
tenants, each new place costing one: a tenant that begins many contexts at once stands
behind the first ones of all others.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass

from ttlcache.estimators.sliding_mean import SlidingMean

#: Ended programs over which the mean is taken, and below which nothing is known.
WINDOW, MIN_ENDED = 1000, 5
#: A quantum is so many times what the mean program takes: longer programs are few, or
#: much longer than the rest, and to serve those last shortens the mean.
PROGRAMS_PER_QUANTUM = 4.0
#: It is so many turns, or mean turns' seconds, at least, also while little is known.
LEAST_TURNS = 20
#: Each but a context's first lasts for so much of that: what has used up one may never
#: end, and newcomers wait for it (5 times as long as on vLLM otherwise: `bench abuse`).
LATER_SHARE = 0.25
#: One program counts for at most so many mean turns: few must not make all quanta.
MOST_TURNS = 256
#: Tenants remembered whose last context has not begun yet.
MAX_TENANTS = 4096


@dataclass(slots=True, eq=False)
class Place:
    """Where a context stands in the queue.

    seq: from `PlaceNumbers`; smaller is served first.
    turns: turns of it that were admitted.
    served_s: seconds that they ran, and that the engine stood still for its pins.
    quantum_from_turn, quantum_from_s: `turns` and `served_s` when its quantum began.
    is_used_up: its quantum is, and no turn was admitted since: a pin gives no rank.
    is_later: its first quantum is over.
    """

    seq: int
    turns: int = 0
    served_s: float = 0.0
    quantum_from_turn: int = 0
    quantum_from_s: float = 0.0
    is_used_up: bool = False
    is_later: bool = False

    def on_allocated(self) -> None:
        """A turn got its memory: the next quantum begins if the last one is used up."""
        self.turns += 1
        if self.is_used_up:
            self.is_used_up = False
            self.quantum_from_s = self.served_s
            self.quantum_from_turn = self.turns - 1

    def charge(self, seconds: float, quantum: Quantum) -> bool:
        """A turn ran for so long; True if that used up the quantum.

        The caller must then give the context a new place with `move_back`.
        """
        self.served_s += seconds
        share = LATER_SHARE if self.is_later else 1.0
        return not self.is_used_up and (
            self.served_s - self.quantum_from_s >= share * quantum.seconds
            or self.turns - self.quantum_from_turn >= share * quantum.turns
        )

    def move_back(self, seq: int) -> None:
        """Its quantum is used up; `seq` is a new place's, see `PlaceNumbers.next`."""
        self.seq = seq
        self.is_used_up = self.is_later = True


@dataclass(slots=True)
class _TenantPlaces:
    """Numbers of one tenant's places, and how many it got lately.

    last: number of its latest place. highest: the largest that it was given.
    recent: places that it got, each worth less the older it was at `updated_s`.
    new: places that it got since then.
    """

    last: int = 0
    highest: int = 0
    recent: float = 0.0
    new: int = 0
    updated_s: float = -math.inf


class PlaceNumbers:
    """Gives places numbers. Of one tenant alone: 1, 2, 3, …, the order of arrival."""

    def __init__(self) -> None:
        self._started = 0  # largest number of a context of which a turn was admitted
        self._tenants: OrderedDict[str, _TenantPlaces] = OrderedDict()

    def next(self, tenant: str) -> int:
        """The number of a new place: behind those of its tenant, and behind those of
        other tenants that stood at the head already."""
        own = self._tenants.setdefault(tenant, _TenantPlaces())
        own.last = max(self._started, own.last) + 1
        if own.last > own.highest:  # none that was given back
            own.highest = own.last
            own.new += 1
        self._tenants.move_to_end(tenant)
        if len(self._tenants) > MAX_TENANTS:
            self._tenants.popitem(last=False)
        return own.last

    def give_back(self, tenant: str, number: int) -> None:
        """No turn was admitted from this place, none will be: the next one gets it."""
        own = self._tenants.get(tenant)
        if own is not None and min(number, own.last) > self._started:
            own.last -= 1

    def update_recent(self, tenant: str, now_s: float, period_s: float) -> None:
        """Bring `recent` up to now; a place is worth 1/e after `period_s`."""
        own = self._tenants.get(tenant)
        if own is not None:
            passed_s = max(0.0, now_s - own.updated_s)  # a clock may go back
            kept = math.exp(-passed_s / period_s) if period_s > 0.0 else 0.0
            own.recent, own.new = kept * own.recent + own.new, 0
            own.updated_s = now_s

    def recent(self, tenant: str) -> float:
        """Places that the tenant got lately, as of `update_recent`.

        Its own: what others begin must not put its programs back. A place after a
        quantum counts like that of a context that begins.
        """
        own = self._tenants.get(tenant)
        return 0.0 if own is None else own.recent

    def on_allocated(self, number: int) -> None:
        """A turn that stood at this number got its memory."""
        self._started = max(self._started, number)


class Quantum:
    """For how much service a place lasts."""

    def __init__(self, fixed_turns: int | None = None) -> None:
        """
        Args:
            fixed_turns: it is worth so many mean turns, and lasts for so many at most;
                None: learnt from programs that ended.
        """
        self._fixed_turns = fixed_turns
        # Neither a flood of one-shot requests must make all quanta (first turns count
        # only while there were no others), nor one turn that was paused.
        self._first_s, self._later_s = SlidingMean(WINDOW), SlidingMean(WINDOW)
        self._program_s, self._program_turns = SlidingMean(WINDOW), SlidingMean(WINDOW)

    def on_turn(self, seconds: float, *, is_first: bool) -> None:
        """A turn of any program ran for so long, the first of its context or not."""
        mean = self._first_s if is_first else self._later_s
        if mean.count:
            seconds = min(seconds, MOST_TURNS * mean.value)
        mean.observe(seconds)

    @property
    def turn_seconds(self) -> SlidingMean:
        """Mean seconds that one of the latest turns ran."""
        return self._later_s if self._later_s.count else self._first_s

    def on_program_end(self, place: Place) -> None:
        """A program is over. One-shot requests say nothing of how long programs are."""
        if place.turns > 1:
            most_s = MOST_TURNS * self.turn_seconds.value
            self._program_s.observe(min(place.served_s, most_s))
            self._program_turns.observe(min(place.turns, MOST_TURNS))

    @property
    def seconds(self) -> float:
        """Infinite until a turn has run."""
        if not self.turn_seconds.count:
            return math.inf
        if self._fixed_turns is not None:
            return self._fixed_turns * self.turn_seconds.value
        least_s = LEAST_TURNS * self.turn_seconds.value
        if self._program_s.count < MIN_ENDED:
            return least_s
        return max(least_s, PROGRAMS_PER_QUANTUM * self._program_s.value)

    @property
    def turns(self) -> float:
        """For how many turns a place lasts at most, however short they are."""
        if self._fixed_turns is not None:
            return self._fixed_turns
        turns = self._program_turns
        mean = turns.value if turns.count >= MIN_ENDED else 0.0
        return max(LEAST_TURNS, PROGRAMS_PER_QUANTUM * mean)
