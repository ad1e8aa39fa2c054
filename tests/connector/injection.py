"""Throws from inside every hook: below the guards, where real bugs would be.

Each point is the innermost call that a hook makes, named by the label under which
its exception must be counted. It throws before the real call or after it: then the
tables have changed, and what the hook would have done next is missing.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any


def _at(path: str, method: str, *labels: str) -> tuple[str, str, frozenset[str]]:
    return path, method, frozenset(labels)


_CONTROLLER, _HOLDER = "parts.controller", "parts.holder"
_QUEUE, _MEMORY = f"{_CONTROLLER}.queue", f"{_CONTROLLER}.memory"
_METRICS = f"{_CONTROLLER}.telemetry.metrics"
_TURNS = ("on_arrival", "on_allocated", "on_finished", "before_step", "eviction")
#: point -> (object below the scheduler role, method, labels it is counted under).
POINTS: dict[str, tuple[str, str, frozenset[str]]] = {
    "on_arrival": _at(_CONTROLLER, "on_arrival", "on_arrival"),
    "priority": _at(_QUEUE, "priority", "priority"),
    "is_newcomer": _at(_MEMORY, "is_newcomer", "is_newcomer"),
    "refresh_place": _at(_QUEUE, "refresh_place", "refresh_place"),
    "max_wait_s": _at(f"{_QUEUE}.wait_bound", "seconds", "max_wait_s"),
    "may_start": _at(_MEMORY, "may_start", "admission"),
    "reclaim": _at(_MEMORY, "reclaim", "eviction"),
    "note_local_hit": _at("requests._local_hits", "__setitem__", "note_local_hit"),
    "on_allocated": _at(_CONTROLLER, "on_allocated", "on_allocated"),
    "prefilled": _at(_CONTROLLER, "on_prefilled", "before_step", "on_finished"),
    "finish": _at(_CONTROLLER, "on_finished", "on_finished"),
    "candidate": _at(_HOLDER, "candidate", "on_finished"),
    "hold": _at(_HOLDER, "hold", "on_finished"),
    "tick": _at(_CONTROLLER, "tick", "before_step"),
    "steps": _at("steps._steps", "append", "on_scheduled"),
    "on_step": _at(_CONTROLLER, "on_step", "on_step_end"),
    "failed_loads": _at(
        "parts.engine.scheduler._inflight_prefills", "__len__", "put_back_failed_loads"
    ),
    "drain": _at(_METRICS, "drain", "take_stats"),
    "release_all": _at(_MEMORY, "release_all", "release_pins"),
    # Not hooks, but what they all lean on: blocks, the queue, the counters.
    "release": _at(_HOLDER, "release", *_TURNS, "release_pins", "drop_orphans"),
    "pressure": _at(
        *(_HOLDER, "pressure"),
        *("on_finished", "before_step", "admission", "eviction", "take_stats"),
        "on_allocated",
    ),
    "rekey": _at("parts.engine._queue", "rekey", *_TURNS),
    "is_overdue": _at(
        "parts.engine._queue", "is_overdue", "urgency", "eviction", "holds_back"
    ),
    "overdue": _at(_METRICS, "count", "on_overdue"),
}


#: The environment variable by which tests/e2e/faulty_connector.py knows its folder.
FOLDER_VARIABLE = "TTLCACHE_TEST_FAULTS"
#: Its point in the API server's process: those throws are nobody's hook errors.
OBSERVE = "observe"


class InjectedError(RuntimeError):
    """What the guards must catch."""


#: When a call throws.
BEFORE, AFTER = "before", "after"


class Injector:
    """Replaces methods by ones that throw every n-th time, and counts the throws.

    Args:
        when: of the throws in turn, `BEFORE` or `AFTER` the real call.
    """

    #: Points that only throw before the real call.
    before_only: frozenset[str] = frozenset()

    def __init__(
        self,
        every: int,
        told: Callable[[str], None] = lambda point: None,
        when: Sequence[str] = (BEFORE,),
    ) -> None:
        self.every = every
        self.thrown: Counter[str] = Counter()
        self.called: Counter[str] = Counter()
        self.is_on = True
        self._told = told
        self._when = when

    def wrap(self, point: str, method: Any, only: Any = None) -> Any:
        """`method`, throwing; `only` tells from its arguments which calls count."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if not self.is_on or (only is not None and not only(*args)):
                return method(*args, **kwargs)
            self.called[point] += 1
            if self.called[point] % self.every:
                return method(*args, **kwargs)
            when = self._when[self.thrown[point] % len(self._when)]
            if point in self.before_only:
                when = BEFORE
            if when == AFTER:
                method(*args, **kwargs)  # where it throws itself, there is one throw
            self.thrown[point] += 1
            self._told(point)
            raise InjectedError(point)

        return call

    def install(self, role: Any, point: str) -> None:
        """On one engine's scheduler role."""
        path, name, _ = POINTS[point]
        target = role
        *parents, last = path.split(".")
        for part in parents:
            target = getattr(target, part)
        owner, target = target, getattr(target, last)
        only = (
            (lambda what, *_: what == "overdue_requests")
            if point == "overdue"
            else None
        )
        if name.startswith("__") or not hasattr(target, "__dict__"):
            # Special methods are looked up on the class, slots cannot be shadowed.
            method = self.wrap(point, getattr(type(target), name), _second(only))
            members = {name: method, "__slots__": ()}
            copy = type(type(target).__name__, (type(target),), members)
            setattr(owner, last, _moved(target, copy))
        else:
            setattr(target, name, self.wrap(point, getattr(target, name), only))


def _second(only: Any) -> Any:
    return None if only is None else lambda _self, *args: only(*args)


def _moved(target: Any, cls: Any) -> Any:
    """The same contents as an object of a subclass."""
    if isinstance(target, dict | set | deque):
        return cls(target)
    target.__class__ = cls
    return target


@contextmanager
def paused(injector: Injector) -> Iterator[None]:
    injector.is_on = False
    yield
    injector.is_on = True
