"""When a program is expected back, given how long its tool has run already."""

from __future__ import annotations

from ttlcache.estimators.gap_history import GapHistory
from ttlcache.types import GapKey

#: Gaps of a key that went on for longer than this one before they predict anything.
ENOUGH = 8


def expected_gap_s(gaps: GapHistory, key: GapKey, waited_s: float) -> float | None:
    """Median length of the gaps that lasted longer than `waited_s`.

    Of the finest key with `ENOUGH` of them, else of all gaps.

    Returns:
        Seconds from the gap's start; None where too few lasted as long.
    """
    for candidate in (*key.backoff(), None):
        durations = gaps.durations(candidate)  # ascending
        longer = durations[durations > waited_s]
        if len(longer) >= ENOUGH:
            return float(longer[len(longer) // 2])
    return None
