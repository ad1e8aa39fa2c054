"""One gap key's recent records: a ring of durations with sorted, cached views."""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Hashable

import numpy as np

from ttlcache.estimators.survival import (
    EMPTY,
    EMPTY_CURVE,
    FloatArray,
    SurvivalCurve,
    read_only,
    survival_of_sorted,
)

#: Up to this many records, a survival curve is always exact.
_EXACT_RECORDS = 256
#: Above it, a curve may lag by one record in this many.
_LAG_SHARE = 64
#: Seconds by which the ages of open gaps may be out of date, for an exact curve.
_OPEN_LAG_S = 0.25
#: More changes than this are cheaper to sort than to insert.
_MAX_PENDING = 16


class _SortedView:
    """Ascending copy of those ring records whose flag is `flag`, kept lazily."""

    def __init__(self, flag: int) -> None:
        self._flag = flag
        self._sorted: array[float] = array("d")
        self._values = EMPTY  # the same memory
        self._pending: list[tuple[float, bool]] = []
        self._stale = False

    def note(self, value: float, is_new: bool) -> None:
        """Remember a change; it is applied when it is read."""
        if self._stale:
            return
        self._pending.append((value, is_new))
        if len(self._pending) > _MAX_PENDING:
            self._stale = True
            self._pending.clear()

    def get(self, values: array[float], flags: bytearray) -> FloatArray:
        if self._stale:
            mask = np.frombuffer(flags, dtype=np.uint8) == self._flag
            chosen = np.frombuffer(values)[mask]
            chosen.sort()
            self._show(array("d", chosen.tobytes()))
            self._stale = False
        elif self._pending:
            changed = self._sorted[:]  # readers keep what they have
            for value, is_new in self._pending:
                if is_new:
                    insort(changed, value)
                else:
                    del changed[bisect_left(changed, value)]
            self._pending.clear()
            self._show(changed)
        return self._values

    def _show(self, ascending: array[float]) -> None:
        self._sorted = ascending
        self._values = read_only(np.frombuffer(ascending))


class GapWindow:
    """The last `capacity` gaps of one key, completed and censored, and open ones.

    Completed and censored gaps share one ring, so that both forget at the same
    pace and their ratio stays true. Arrays handed out are snapshots: read-only,
    and never changed by later records.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._values: array[float] = array("d")
        self._flags = bytearray()  # 1 where completed, 0 where censored
        self._next = 0  # slot of the oldest record once the ring is full
        self._completed = _SortedView(1)
        self._censored = _SortedView(0)
        self._version = 0
        self._curve = EMPTY_CURVE
        self._curve_version = 0
        self._curve_now_s: float | None = None
        self.num_completed = 0
        self.open_since_s: dict[Hashable, float] = {}

    def __len__(self) -> int:
        return len(self._values)

    def add(self, gap_s: float, completed: bool) -> None:
        """Record a gap, forgetting the oldest one when the ring is full."""
        values, flags = self._values, self._flags
        if len(values) < self._capacity:
            values.append(gap_s)
            flags.append(completed)
        else:
            slot = self._next
            was_completed = flags[slot]
            view = self._completed if was_completed else self._censored
            view.note(values[slot], False)
            self.num_completed -= was_completed
            values[slot] = gap_s
            flags[slot] = completed
            self._next = (slot + 1) % self._capacity
        view = self._completed if completed else self._censored
        view.note(gap_s, True)
        self.num_completed += completed
        self._version += 1

    def close(self, token: Hashable) -> float | None:
        """An open gap is open no more; what became of it is a separate record."""
        since_s = self.open_since_s.pop(token, None)
        if since_s is not None:
            self._version += 1
        return since_s

    def durations(self) -> FloatArray:
        """Completed gaps in seconds, ascending."""
        return self._completed.get(self._values, self._flags)

    def survival(self, now_s: float | None) -> SurvivalCurve:
        """Kaplan-Meier curve; with `now_s`, open gaps count as censored at their age.

        Exact up to 256 records; above, up to 1/64 of the records late, because
        a new curve costs more than a decision may.
        """
        records = len(self._values)
        stride = 1 if records <= _EXACT_RECORDS else records // _LAG_SHARE
        if self._version - self._curve_version >= stride or self._aged(now_s, stride):
            self._curve = self._build(now_s)
            self._curve_version = self._version
            self._curve_now_s = now_s
        return self._curve

    def _aged(self, now_s: float | None, stride: int) -> bool:
        before_s = self._curve_now_s
        if now_s is None or before_s is None:
            return now_s is not before_s
        if not self.open_since_s:
            return False
        return abs(now_s - before_s) >= stride * _OPEN_LAG_S

    def _build(self, now_s: float | None) -> SurvivalCurve:
        censored = self._censored.get(self._values, self._flags)
        if now_s is not None and self.open_since_s:
            since_s = self.open_since_s
            ages = now_s - np.fromiter(since_s.values(), np.float64, len(since_s))
            censored = np.concatenate((censored, ages)) if len(censored) else ages
            censored.sort()
            if censored.item(0) < 0.0:  # the clock went back
                np.maximum(censored, 0.0, out=censored)
        return survival_of_sorted(self.durations(), censored)
