"""Our own rule: CacheTTL's bargain with the costs that are really paid.

    tau* = argmax over tau in {0} and the recorded gaps of
               F(tau) * B - price * E[min(gap, tau)]
    B    = weight * (expected seconds to rebuild the context)

Where it differs from CacheTTL v4 (`cachettl`), and why:

E[min(gap, tau)]   not tau: a pin that is claimed early stops costing.
price, weight      not 1: both sides are delays of others (`costs.MemoryPrice`). While
                   no request waits memory is free, and the TTL infinite (that is, the
                   cap) until one does (`uncontended`). Queueing again, the paper's
                   T * eta, is no waste: another request is served meanwhile. Where the
                   pool is unknown: price 1, B = T * eta + rebuild, as in the paper.
rebuild            by a reload as often as the lower tier lately had what was evicted
                   and wanted again, else by a prefill.
F                  by Kaplan-Meier: gaps that never ended, and those still open, count
                   too. A client's own estimate of the gap replaces it.
stall_wait_s       an engine with nothing to run waits for a pin's next turn as long as
                   rebuilding its context would take (ski rental).
min_keep_share     when every program has lost part of its context, each return evicts
                   another program's pin (thrashing): a pin loses a little of its tail,
                   and beyond that goes as a whole. What the lower tier has already, so
                   that evicting it costs no copy, always goes as a whole.
yields             where the lower tier keeps what it gets, a pin saves a reload: no
                   reason to keep a request waiting.

Each is one method or attribute: `bench/sim/rivals/ablations.py` takes each away.
"""

from __future__ import annotations

import math
from typing import ClassVar, NamedTuple

from ttlcache.estimators.costs import MemoryPrice, RebuildCost
from ttlcache.estimators.gap_history import is_human_gap
from ttlcache.estimators.survival import FloatArray, SurvivalCurve
from ttlcache.policies.base import Policy, View, remaining
from ttlcache.policies.cachettl import bounded, default_ttl_s
from ttlcache.types import Decision, GapKey, TurnFacts


class Terms(NamedTuple):
    """Of one decision: B in seconds, and the price of memory."""

    benefit_s: float
    price: float


class Adaptive(Policy):
    """TTL by priced survival analysis."""

    name = "adaptive"
    reads_eta = True

    #: Gaps, ended or not, above which a key's history is trusted.
    MIN_RECORDS: ClassVar[int] = 50
    #: A client's estimate is stretched by this factor.
    ETA_MARGIN: ClassVar[float] = 1.5
    #: A pin with less than this share of its blocks goes as a whole.
    MIN_KEEP_SHARE: ClassVar[float] = 0.8

    def decide(self, turn: TurnFacts, view: View) -> Decision:
        rebuild = self._rebuild_cost(turn, view)
        terms = self._terms(turn, view, rebuild)
        ttl_s, reason = self._ttl_s(turn, view, terms)
        tier_has_copy = view.tier is not None and view.tier_has_copy
        return Decision(
            ttl_s,
            reason,
            {"benefit_s": terms.benefit_s, "price": terms.price},
            stall_wait_s=rebuild.seconds,
            min_keep_share=1.0 if tier_has_copy else self.MIN_KEEP_SHARE,
            uncontended=terms.price <= 0.0,
            yields_to_waiting=view.tier_keeps,
        )

    def _ttl_s(self, turn: TurnFacts, view: View, terms: Terms) -> tuple[float, str]:
        if terms.price <= 0.0:
            return math.inf, "memory-free"
        if terms.benefit_s <= 0.0:
            return 0.0, "no-benefit"
        eta_ttl_s = self._by_client_eta(turn, terms)
        if eta_ttl_s is not None:
            return eta_ttl_s, "client-eta"
        curve, source = self._gap_curve(turn.gap_key, view)
        if curve is None:
            # The paper's T_default, not B / price: where clients say nothing the
            # history learns late that a program is over, and B / price would hold the
            # last context of every one.
            ttl_s = default_ttl_s(terms.benefit_s / terms.price)
            return remaining(ttl_s, turn), source
        return remaining(self._best_ttl_s(curve, terms), turn), source

    def _rebuild_cost(self, turn: TurnFacts, view: View) -> RebuildCost:
        return view.costs.expected_rebuild(turn.context_tokens, view.tier)

    def _terms(self, turn: TurnFacts, view: View, rebuild: RebuildCost) -> Terms:
        price = self._memory_price(turn, view)
        if price is None:
            delay_s = view.costs.queueing_delay_s * view.memoryfulness
            return Terms(bounded(delay_s + rebuild.seconds), price=1.0)
        return Terms(bounded(price.weight * rebuild.seconds), price.per_s)

    def _memory_price(self, turn: TurnFacts, view: View) -> MemoryPrice | None:
        return view.costs.memory_price(view.pressure, turn.kv_blocks)

    def _by_client_eta(self, turn: TurnFacts, terms: Terms) -> float | None:
        """Hold until the announced end if that wait is worth it; None: no estimate.

        An estimate already overrun says nothing more: back to the history.
        """
        if turn.tool_eta_s is None:
            return None
        left_s = turn.tool_eta_s - max(turn.waited_s, 0.0)
        if not left_s > 0.0:
            return None
        if terms.price * left_s > terms.benefit_s:
            return 0.0
        return left_s * self.ETA_MARGIN

    def _gap_curve(self, key: GapKey, view: View) -> tuple[SurvivalCurve | None, str]:
        """The survival of gaps like this one; None where too few are known."""
        gaps = view.gaps
        found = gaps.best_key(key, self.MIN_RECORDS, with_censored=True)
        if found is None and (is_human_gap(key) or gaps.count() <= self.MIN_RECORDS):
            return None, "default"
        source = "survival:global" if found is None else "survival:key"
        return gaps.survival(found, view.now_s), source

    def _best_ttl_s(self, curve: SurvivalCurve, terms: Terms) -> float:
        held_s = self._held_s(curve)
        if len(held_s) == 0:
            return 0.0  # no gap is known to have ended
        # Lost on average, as a share of B: least where F B - price cost is most. Not to
        # hold loses all of B. In place, this is the hot path.
        losses = held_s * (terms.price / terms.benefit_s)
        losses += curve.survival
        best = int(losses.argmin())
        return curve.times.item(best) if losses.item(best) < 1.0 else 0.0

    def _held_s(self, curve: SurvivalCurve) -> FloatArray:
        return curve.held_s
