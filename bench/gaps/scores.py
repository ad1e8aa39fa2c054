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


@dataclass(frozen=True, slots=True)
class Group:
    """The turns of an arm that share a reason or a gap class; sums in seconds.

    best_constant_s, oracle_s: what those turns would have cost under each.
    """

    name: str
    turns: int
    misses: int
    held_s: float
    cost_s: float
    best_constant_s: float
    oracle_s: float


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


def constant(outcomes: Sequence[Outcome], price: float, ttl_s: float) -> list[Outcome]:
    """The same turns under one TTL for all."""
    return [
        _held(o, min(o.gap_s, ttl_s), ttl_s > 0.0 and o.gap_s <= ttl_s)
        for o in outcomes
    ]


def oracle(
    outcomes: Sequence[Outcome], price: float, max_ttl_s: float
) -> list[Outcome]:
    """The same turns under a rule that knows each gap."""

    def holds(o: Outcome) -> bool:
        return o.gap_s <= max_ttl_s and price * o.gap_s <= o.benefit_s

    return [_held(o, o.gap_s if holds(o) else 0.0, holds(o)) for o in outcomes]


def _held(outcome: Outcome, held_s: float, in_time: bool) -> Outcome:
    return Outcome(
        outcome.key,
        outcome.context_tokens,
        outcome.gap_s,
        outcome.benefit_s,
        held_s=held_s,
        in_time=in_time,
    )


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


def by_group(
    outcomes: Sequence[Outcome],
    names: Sequence[str],
    price: float,
    ttl_s: float,
    max_ttl_s: float,
) -> list[Group]:
    """Sums of the turns of each name, the dearest group first."""
    same_turns = (
        outcomes,
        constant(outcomes, price, ttl_s),
        oracle(outcomes, price, max_ttl_s),
    )
    groups = []
    for name in dict.fromkeys(names):
        chosen = [i for i, own in enumerate(names) if own == name]
        own, fixed, ideal = ([arm[i] for i in chosen] for arm in same_turns)
        groups.append(
            Group(
                name=name,
                turns=len(own),
                misses=sum(math.isfinite(o.gap_s) and not o.in_time for o in own),
                held_s=sum(o.held_s for o in own),
                cost_s=_cost(own, price),
                best_constant_s=_cost(fixed, price),
                oracle_s=_cost(ideal, price),
            )
        )
    return sorted(groups, key=lambda group: -group.cost_s)


def _cost(outcomes: Sequence[Outcome], price: float) -> float:
    return sum(o.cost_s(price) for o in outcomes)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0
