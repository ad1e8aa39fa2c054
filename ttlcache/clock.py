"""The only module that reads the machine's clock.

Everything else takes a `Clock`, so that unit tests, the virtual-time bench and
production run the same code.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Clock(Protocol):
    """A source of seconds that never goes backwards in normal operation."""

    def now_s(self) -> float:
        """Seconds since an arbitrary origin."""
        ...


class SystemClock:
    """The machine's monotonic clock."""

    def now_s(self) -> float:
        return time.monotonic()


class VirtualClock:
    """A clock that moves only when told to: for tests and simulation."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move by `seconds`; negative values model a clock that jumps back."""
        self._now_s += seconds

    def set(self, now_s: float) -> None:
        self._now_s = now_s


_default: Clock = SystemClock()


def default_clock() -> Clock:
    """The clock that adapters use when nobody injects another one."""
    return _default


@contextmanager
def use_clock(clock: Clock) -> Iterator[Clock]:
    """Make `clock` the default for adapters constructed inside the block.

    The engine constructs our connector itself, so the bench cannot pass a clock
    to its constructor; this is the way in.
    """
    global _default
    previous, _default = _default, clock
    try:
        yield clock
    finally:
        _default = previous


def wall_s() -> float:
    """Seconds since 1970, to date recordings; it may jump, nothing is timed by it."""
    return time.time()


def stopwatch_s() -> float:
    """Seconds of a high-resolution counter, for measuring our own overhead."""
    return time.perf_counter()


def cpu_s() -> float:
    """Seconds that this thread has run: pauses of the machine do not count."""
    return time.thread_time()
