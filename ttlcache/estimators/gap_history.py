"""Gap history: how long programs stay away between their turns, per gap key."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable
from functools import lru_cache

from ttlcache.estimators.gap_window import GapWindow
from ttlcache.estimators.survival import EMPTY, EMPTY_CURVE, FloatArray, SurvivalCurve
from ttlcache.types import APPROVAL_TOOL, FINAL_TOOL, USER_TOOL, GapKey

#: Gaps in which a human decides: they say nothing about tools.
HUMAN_TOOLS = frozenset({USER_TOOL, FINAL_TOOL, APPROVAL_TOOL})
#: Seconds (30 years) to which every gap is cut: sums and squares stay finite.
MAX_GAP_S = 1e9


@lru_cache(maxsize=8192)
def _backoff(key: GapKey) -> tuple[GapKey, ...]:
    return key.backoff()


def interned(key: GapKey) -> GapKey:
    """An equal key, the same object for all gaps while the key is in use."""
    return _backoff(key)[0]


def is_human_gap(key: GapKey) -> bool:
    """Whether the gap ends when a person acts, not when a tool returns."""
    return key.tool in HUMAN_TOOLS


class GapHistory:
    """Sliding windows of gap durations, per key, per coarser key, and global.

    Every record goes to each key of `GapKey.backoff()` and to the global window,
    with one exception: gaps of the classes user, final and human approval keep to
    their own windows, because the global window stands in for *tools* not seen
    often enough, and a person's pause would drown it. Parallel calls are tools.

    A gap that never ended is a right-censored record: `survival` counts it,
    `durations` does not. Completed and censored records share a window, which
    forgets its oldest record first; that is how drift is followed.

    Memory is bounded: `max_keys` windows of at most `window` records (least
    recently written forgotten first), one of `global_window`, `max_open` open gaps
    (the oldest is censored to make room). Reads change nothing a reader can see.

    Args:
        window: records kept per key.
        global_window: records kept over all keys.
        max_keys: keys with a window of their own.
        max_open: gaps that may be open at once.
    """

    def __init__(
        self,
        window: int = 1000,
        global_window: int = 10_000,
        max_keys: int = 4096,
        max_open: int = 65_536,
    ) -> None:
        self._window = window
        self._max_keys = max_keys
        self._max_open = max_open
        self._global = GapWindow(global_window)
        self._windows: OrderedDict[GapKey, GapWindow] = OrderedDict()
        #: Gaps that have not ended, by their tokens.
        self._open: dict[Hashable, GapKey] = {}

    def start(self, gap_id: Hashable, key: GapKey, now_s: float) -> None:
        """A turn finished: the gap called `gap_id` opens. Reopening replaces it."""
        if gap_id in self._open:
            self.drop(gap_id)
        if len(self._open) >= self._max_open:
            self.abandon(next(iter(self._open)), now_s)
        self._open[gap_id] = interned(key)  # one tuple for all gaps of the key
        for window in self._windows_of(key):
            window.open_since_s[gap_id] = now_s

    def finish(self, gap_id: Hashable, now_s: float) -> float | None:
        """The next turn arrived: record the gap and return its seconds.

        None for an unknown gap. A clock that went back gives 0.
        """
        opened = self._close(gap_id)
        if opened is None:
            return None
        key, since_s = opened
        gap_s = now_s - since_s if now_s > since_s else 0.0
        self.observe(key, gap_s)
        return gap_s

    def abandon(self, gap_id: Hashable, now_s: float) -> None:
        """It is not followed any more: censored at the age reached."""
        opened = self._close(gap_id)
        if opened is not None:
            key, since_s = opened
            self.observe(key, max(now_s - since_s, 0.0), completed=False)

    def drop(self, gap_id: Hashable) -> None:
        """Forget an open gap without any record."""
        self._close(gap_id)

    def _close(self, gap_id: Hashable) -> tuple[GapKey, float] | None:
        key = self._open.pop(gap_id, None)
        if key is None:
            return None
        since_s = self._global.close(gap_id)
        for each in _backoff(key):
            window = self._windows.get(each)
            if window is not None:
                closed_s = window.close(gap_id)
                since_s = closed_s if since_s is None else since_s
        return None if since_s is None else (key, since_s)

    def observe(self, key: GapKey, gap_s: float, *, completed: bool = True) -> None:
        """A gap of `gap_s` seconds, or one known only to have lasted longer."""
        if not math.isfinite(gap_s):
            return
        if not 0.0 <= gap_s <= MAX_GAP_S:
            gap_s = 0.0 if gap_s < 0.0 else MAX_GAP_S
        for window in self._windows_of(key):
            window.add(gap_s, completed)

    def _windows_of(self, key: GapKey) -> list[GapWindow]:
        """The windows that a gap of `key` is written to, made where missing."""
        windows = []
        for each in _backoff(key):
            window = self._windows.get(each)
            if window is None:
                window = self._new_window(each)
            else:
                self._windows.move_to_end(each)
            windows.append(window)
        if not is_human_gap(key):
            windows.append(self._global)
        return windows

    def _new_window(self, key: GapKey) -> GapWindow:
        while len(self._windows) >= self._max_keys:
            self._windows.popitem(last=False)
        window = self._windows[key] = GapWindow(self._window)
        return window

    def count(self, key: GapKey | None = None, *, with_censored: bool = False) -> int:
        """Gaps in the key's window: completed ones, or all with `with_censored`."""
        window = self._find(key)
        if window is None:
            return 0
        return len(window) if with_censored else window.num_completed

    def _find(self, key: GapKey | None) -> GapWindow | None:
        return self._global if key is None else self._windows.get(key)

    def durations(self, key: GapKey | None = None) -> FloatArray:
        """Completed gaps of the key's window in seconds, ascending, read-only."""
        window = self._find(key)
        return window.durations() if window is not None else EMPTY

    def survival(
        self, key: GapKey | None = None, now_s: float | None = None
    ) -> SurvivalCurve:
        """Kaplan-Meier curve of the key's window; see `GapWindow.survival`."""
        window = self._find(key)
        return window.survival(now_s) if window is not None else EMPTY_CURVE

    def best_key(
        self, key: GapKey, min_records: int, with_censored: bool = False
    ) -> GapKey | None:
        """The finest key with more than `min_records` gaps, else None.

        Completed gaps, or all with `with_censored`. None means that only the global
        window is left to ask.
        """
        for candidate in _backoff(key):
            if self.count(candidate, with_censored=with_censored) > min_records:
                return candidate
        return None
