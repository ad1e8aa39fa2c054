"""Order of the waiting queue: smaller keys are served first.

Adding one: a subclass of `Ordering` in `ORDERINGS`, its name in `ttlcache.config`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

from ttlcache.class_path import load_class
from ttlcache.types import Rank

#: (not preempted, without a pin to claim, rank …, request arrival): smaller first.
#: `QueueOrder.priority` puts the user's priority before it.
PriorityKey = tuple[int, ...]


class QueuedTurn(NamedTuple):
    """What an ordering may know about a waiting request."""

    preempted: bool
    claimable: bool  # its program's pin is alive and it will claim it
    queue_place: int  # place of its context in the queue
    request_seq: int  # arrival number of the request itself
    work_delay_places: int = 0  # by which its program's expected work left puts it back


class Ordering(ABC):
    """A rule that sorts waiting requests. Pure.

    The configuration names it by `name`, or as "package.module:Class".

    places_end: whether a program that used up its quantum of service queues as if new.
    uses_work: whether keys depend on `QueuedTurn.work_delay_places`.
    """

    name: ClassVar[str]
    places_end: ClassVar[bool] = True
    uses_work: ClassVar[bool] = False

    @abstractmethod
    def key(self, turn: QueuedTurn) -> PriorityKey:
        """Sort key; must depend on `turn` only.

        The user's priority, if the engine allows it, goes before it (`QueueOrder`).
        """

    def rank(self, turn: QueuedTurn) -> Rank:
        """Where its program stands against other programs' pins.

        A request takes pins of a larger rank only, so that pins never turn the order
        around. Place of the program unless the ordering has its own. The user's
        priority goes before it, too.
        """
        return (turn.queue_place,)


class TTLAware(Ordering):
    """Preempted, then pinned within TTL, then program arrival (paper §4.3)."""

    name = "ttl-aware"

    def key(self, turn: QueuedTurn) -> PriorityKey:
        return (
            not turn.preempted,
            not turn.claimable,
            *self.rank(turn),
            turn.request_seq,
        )


class ProgramFCFS(Ordering):
    """Contexts in order of their places, pinned or not (paper §6.4, ablation)."""

    name = "program-fcfs"

    def key(self, turn: QueuedTurn) -> PriorityKey:
        return (not turn.preempted, 0, turn.queue_place, turn.request_seq)


class RequestFCFS(Ordering):
    """vLLM's own order."""

    name = "request-fcfs"

    def key(self, turn: QueuedTurn) -> PriorityKey:
        return (not turn.preempted, 0, 0, turn.request_seq)


class ExpectedFinish(TTLAware):
    """TTL-aware, but new programs pass those expected to finish later than they; ours.

    Place, put back by the places that are given while a mean program runs, times the
    work left beyond a new program's over a mean program's work
    (`RemainingWork.work_delay_places`). Where programs are alike, or work cannot be
    foreseen, this is TTL-aware.
    """

    name = "expected-finish"
    uses_work = True

    def rank(self, turn: QueuedTurn) -> Rank:
        return (turn.queue_place + turn.work_delay_places,)


ORDERINGS: dict[str, type[Ordering]] = {
    cls.name: cls for cls in (TTLAware, ProgramFCFS, RequestFCFS, ExpectedFinish)
}


def create(name: str) -> Ordering:
    """An ordering by its name, or by "package.module:Class".

    Raises:
        ConfigError: there is no such class, or it is no subclass of `Ordering`.
        KeyError: a name that `TTLCacheConfig` would not let pass.
    """
    if ":" not in name:
        return ORDERINGS[name]()
    found: type[Ordering] = load_class(
        name,
        Ordering,
        f"kv_connector_extra_config: key 'ordering' has value {name!r}, expected: a "
        f"subclass of {__name__}.Ordering",
    )
    return found()
