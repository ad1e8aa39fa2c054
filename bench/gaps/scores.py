"""Scores of replayed gaps: cost, and regret to what hindsight would have done.

The loss of a turn is price * seconds held + B if the next turn came and found
nothing. Two references see all gaps at once: the best constant TTL, and the oracle,
which holds a gap to its end iff price * gap <= B and otherwise not at all. Neither
exceeds the TTL cap.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from bench.gaps.replay import STEP_S, Outcome
from ttlcache.analysis.hindsight import best_ttl_s


@dataclass(frozen=True, slots=True)
class Score:
    """Means over the decided turns of one arm.

    in_time: share of the returns that found their KV.
    pinned_s, cost_s: seconds a turn. ttl_s: the constant, where it is one.
    """

    turns: int
    returns: int
    in_time: float
    pinned_s: float
    cost_s: float
    ttl_s: float | None = None

    def regret_s(self, reference: Score) -> float:
        """Seconds a turn above `reference`."""
        return self.cost_s - reference.cost_s

    def regret_share(self, reference: Score) -> float:
        """Cost above `reference`, as a share of that one's."""
        if reference.cost_s == 0.0:
            return math.inf if self.cost_s > 0.0 else 0.0
        return self.cost_s / reference.cost_s - 1.0


def score(outcomes: Sequence[Outcome], price: float) -> Score:
    """What a replay cost."""
    returns = [o for o in outcomes if math.isfinite(o.gap_s)]
    return Score(
        turns=len(outcomes),
        returns=len(returns),
        in_time=_mean([float(o.in_time) for o in returns]),
        pinned_s=_mean([o.held_s for o in outcomes]),
        cost_s=_mean([o.cost_s(price) for o in outcomes]),
    )


def oracle(
    outcomes: Sequence[Outcome], price: float, max_ttl_s: float
) -> list[Outcome]:
    """The same turns under a rule that knows each gap."""
    found = []
    for o in outcomes:
        holds = o.gap_s <= max_ttl_s and price * o.gap_s <= o.benefit_s
        held_s = o.gap_s if holds else 0.0
        found.append(Outcome(o.gap_s, o.benefit_s, held_s=held_s, in_time=holds))
    return found


def best_constant_s(
    outcomes: Sequence[Outcome], price: float, max_ttl_s: float
) -> float:
    """The constant TTL of the least cost; the shortest one among equals."""
    return best_ttl_s(
        [o.gap_s for o in outcomes],
        [price] * len(outcomes),
        [o.benefit_s for o in outcomes],
        max_ttl_s,
        STEP_S,  # a TTL of 0 makes no pin, not even for a gap of 0
    )


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0
