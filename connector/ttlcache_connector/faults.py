"""Fail open: an exception in our hooks never reaches the engine."""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from ttlcache_connector.log import logger

log = logger(__name__)

#: After so many faults within this time the hooks are given up; a rare one now and then
#: turns nothing off.
MAX_FAULTS, WINDOW_S = 100, 600.0

P = ParamSpec("P")
R = TypeVar("R")


class Faults:
    """Counts exceptions per hook, logs each hook's first one, gives up at last.

    Args:
        turn_off: called after `MAX_FAULTS` exceptions within `WINDOW_S`.
    """

    def __init__(
        self,
        count: Callable[[str], None],
        turn_off: Callable[[], None],
        now_s: Callable[[], float],
    ) -> None:
        self._now_s = now_s
        self._recent: deque[float] = deque(maxlen=MAX_FAULTS)
        self._count = count
        self._turn_off = turn_off
        self._logged: set[str] = set()
        self.total = 0

    def record(self, hook: str) -> None:
        """Called inside an `except` block."""
        self.total += 1
        # A counter that fails must not undo what the guard is for.
        with contextlib.suppress(Exception):
            self._count(hook)
        if hook not in self._logged:
            self._logged.add(hook)
            log.warning(
                "ttlcache: hook %s failed; the request is served without "
                "retention (logged once per hook)",
                hook,
                exc_info=True,
            )
        self._recent.append(self._now_s())
        span_s = self._recent[-1] - self._recent[0]
        if len(self._recent) == self._recent.maxlen and span_s <= WINDOW_S:
            self._recent.clear()
            log.warning(
                "ttlcache: %d faults within %.0f s: this part of it is now off",
                self._recent.maxlen,
                span_s,
            )
            try:
                self._turn_off()
            except Exception:
                log.warning("ttlcache: turning off failed", exc_info=True)


class HasFaults(Protocol):
    """What a guarded method's object must offer."""

    faults: Faults


S = TypeVar("S", bound=HasFaults)


def guarded(
    fallback: Any = None,
) -> Callable[[Callable[Concatenate[S, P], R]], Callable[Concatenate[S, P], R]]:
    """Turn exceptions of a hook into `fallback`, counted under the hook's name."""

    def decorate(
        hook: Callable[Concatenate[S, P], R],
    ) -> Callable[Concatenate[S, P], R]:
        @functools.wraps(hook)
        def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return hook(self, *args, **kwargs)
            except Exception:  # noqa: BLE001 - the serving path fails open
                self.faults.record(hook.__name__)
                return fallback  # type: ignore[no-any-return]

        return call

    return decorate
