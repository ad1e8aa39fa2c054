"""`adaptive` with one idea less: what each deviation from CacheTTL is worth.

As an arm: `--arms 'adaptive,adaptive:no-repricing'`. Adding one: a subclass that
overrides one method or attribute, and an entry in `ABLATIONS`.
"""

from __future__ import annotations

import math

from ttlcache import policies
from ttlcache.estimators.costs import MemoryPrice, RebuildCost
from ttlcache.estimators.gap_history import is_human_gap
from ttlcache.estimators.survival import (
    EMPTY,
    FloatArray,
    SurvivalCurve,
    survival_of_sorted,
)
from ttlcache.policies.adaptive import Adaptive, Terms
from ttlcache.policies.base import View
from ttlcache.types import Decision, GapKey, TurnFacts


class ChargeWholeTTL(Adaptive):
    """A pin costs its whole TTL, however early it is claimed."""

    def _held_s(self, curve: SurvivalCurve) -> FloatArray:
        return curve.times


class FlatPrice(Adaptive):
    """A held second costs a second, and queueing again counts: the paper's bargain."""

    def _memory_price(self, turn: TurnFacts, view: View) -> MemoryPrice | None:
        return None


class NoStallWait(Adaptive):
    """An engine with nothing to run takes pins at once."""

    def decide(self, turn: TurnFacts, view: View) -> Decision:
        return super().decide(turn, view)._replace(stall_wait_s=0.0)


class NoWholeVictims(Adaptive):
    """Under pressure a pin gives way block by block, to the last one."""

    def decide(self, turn: TurnFacts, view: View) -> Decision:
        return super().decide(turn, view)._replace(min_keep_share=0.0)


class TierKeepsAll(Adaptive):
    """A lower tier is believed to have all that was evicted."""

    def _rebuild_cost(self, turn: TurnFacts, view: View) -> RebuildCost:
        return cost_if_tier_keeps_all(turn, view)


class EndedGapsOnly(Adaptive):
    """Gaps that never ended, or are still open, do not count."""

    def _gap_curve(self, key: GapKey, view: View) -> tuple[SurvivalCurve | None, str]:
        found = view.gaps.best_key(key, self.MIN_RECORDS)
        if found is None and (
            is_human_gap(key) or view.gaps.count() <= self.MIN_RECORDS
        ):
            return None, "default"
        return survival_of_sorted(view.gaps.durations(found), EMPTY), "ended gaps"


class NoClientEstimate(Adaptive):
    """What the client says of the gap's length is not read."""

    def _by_client_eta(self, turn: TurnFacts, terms: Terms) -> float | None:
        return None


class NoRepricing(Adaptive):
    """A TTL given while memory was free stands when a request waits for memory."""

    def decide(self, turn: TurnFacts, view: View) -> Decision:
        return super().decide(turn, view)._replace(uncontended=False)


class NoHistory(Adaptive):
    """No history is ever trusted: the cold start's TTL for every gap."""

    MIN_RECORDS = 10**9


ABLATIONS: dict[str, type[Adaptive]] = {
    "charge-whole-ttl": ChargeWholeTTL,
    "flat-price": FlatPrice,
    "no-stall-wait": NoStallWait,
    "no-whole-victims": NoWholeVictims,
    "tier-keeps-all": TierKeepsAll,
    "ended-gaps-only": EndedGapsOnly,
    "no-client-estimate": NoClientEstimate,
    "no-repricing": NoRepricing,
    "no-history": NoHistory,
}


def cost_if_tier_keeps_all(turn: TurnFacts, view: View) -> RebuildCost:
    """A reload wherever that is cheaper than a prefill."""
    tokens = turn.context_tokens
    prefill_s = view.costs.prefill_s(tokens)
    reload_s = view.costs.reload_s(view.tier, tokens) if view.tier else math.inf
    if reload_s >= prefill_s:
        return RebuildCost(prefill_s)
    return RebuildCost(0.0, reload_s)


for _name, _class in ABLATIONS.items():
    policies.register(f"adaptive:{_name}", f"{__name__}:{_class.__name__}")
