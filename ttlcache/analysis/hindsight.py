"""What turns cost, and what two references that know their gaps would have paid.

The cost of a turn is what the policies themselves reckon with: `price` times the
seconds held, plus B if the next turn came and found nothing. The oracle decides each
turn by its own gap: min(price * gap, B). The best constant is the one TTL for all turns
that would have cost least. Neither holds longer than `max_ttl_s`, and neither ever has
to give way to another program's need of memory, as real pins do.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ttlcache.analysis.recording import Decided, TurnLog
from ttlcache.estimators.survival import FloatArray

#: The shortest TTL that makes a pin: even a gap of 0 needs one.
SHORTEST_S = 1e-3


def cost_s(turn: TurnLog) -> float | None:
    """What a turn did cost; None if nothing was decided or its pin still lives."""
    decided, pin = turn.decided, turn.pin
    if decided is None or (pin is not None and pin.end_s is None):
        return None
    lost = turn.next_gap_s is not None and not turn.next_claimed
    held_s = 0.0 if pin is None else pin.lived_s
    return decided.price * held_s + (decided.benefit_s if lost else 0.0)


def oracle_s(turn: TurnLog, max_ttl_s: float) -> float:
    """A turn that nobody went on from is not held, and costs nothing."""
    decided = _of(turn)
    if turn.next_gap_s is None:
        return 0.0
    if turn.next_gap_s > max_ttl_s:
        return decided.benefit_s
    return min(decided.price * turn.next_gap_s, decided.benefit_s)


def constant_s(turn: TurnLog, ttl_s: float) -> float:
    """The cost of a turn under that TTL; a TTL of 0 makes no pin."""
    decided, gap_s = _of(turn), turn.next_gap_s
    if gap_s is None:
        return decided.price * ttl_s
    if ttl_s > 0.0 and gap_s <= ttl_s:
        return decided.price * gap_s
    return decided.price * ttl_s + decided.benefit_s


def best_constant_s(turns: Sequence[TurnLog], max_ttl_s: float) -> float:
    """The TTL of the least cost over `turns`; the shortest one among equals.

    Between two gaps a longer TTL only costs, so that 0 and the gaps themselves are all
    the candidates. O(n log n).
    """
    if not turns:
        return 0.0
    gaps = np.array([t.next_gap_s for t in turns], dtype=float)  # None: NaN, sorts last
    order = np.argsort(gaps, kind="stable")
    gaps, price = gaps[order], np.array([_of(t).price for t in turns])[order]
    returned = np.isfinite(gaps)
    losses_s = np.array([_of(t).benefit_s for t in turns])[order] * returned
    rents_s = price * np.where(returned, gaps, 0.0)
    candidates_s = np.unique(np.maximum(gaps[returned], SHORTEST_S))
    candidates_s = candidates_s[candidates_s <= max_ttl_s]
    candidates_s = np.concatenate([[0.0], candidates_s])
    claimed = np.searchsorted(gaps, candidates_s, side="right")
    claimed[0] = 0
    costs_s = (
        _before(rents_s)[claimed]
        + candidates_s * (price.sum() - _before(price)[claimed])
        + (losses_s.sum() - _before(losses_s)[claimed])
    )
    return float(candidates_s[int(costs_s.argmin())])


def _before(values: FloatArray) -> FloatArray:
    """Sums of the first 0, 1, 2, … values."""
    return np.concatenate([[0.0], np.cumsum(values)])


def _of(turn: TurnLog) -> Decided:
    if turn.decided is None:
        raise ValueError(f"turn {turn.turn}: nothing was decided")
    return turn.decided
