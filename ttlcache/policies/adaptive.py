"""Our own rule: CacheTTL's bargain with the costs that are really paid.

    tau* = argmax over tau of F(tau) * B - price * E[min(gap, tau)]
    B    = weight * PrefillReload(r)

What differs from CacheTTL v4 (`cachettl`), each behind its own option so that an
ablation can take it away (docs/policy.md):

charge_what_is_used   a pin that is claimed early stops costing: E[min(gap, tau)]
                      instead of tau.
price_memory          both sides are delays of others (`costs.MemoryPrice`): a held
                      second delays those who wait by the share of the pool it takes,
                      a second of recovery all who wait and all who run. While nobody
                      waits memory is free and the TTL infinite. Queueing again, the
                      paper's T * eta, is no waste: somebody else is served meanwhile.
                      Off, or with an unknown pool: price 1, B = T * eta +
                      PrefillReload(r).
patient_stalls        an engine with nothing to run waits for a pin's next turn for as
                      long as recovering its context would take (ski rental) before it
                      takes the pin.
whole_victims         under pressure a pin may lose a little of its tail, and beyond
                      that goes as a whole (`min_keep_share`): of programs that all lost
                      much none can run without taking somebody else's. What a lower
                      tier has already, so that giving it up costs a reload and no copy,
                      always goes as a whole.
lone_reloads          what a lower tier has already (write-through) comes back beside
                      the others' steps: a second of it delays its own program alone,
                      and those who wait by the memory it takes. What it has not yet
                      counts in full: to let go of it would cost a copy of it first.
kept_share            a lower tier is believed as far as it lately had what was given up
                      and wanted again (`CostModel.kept_share`); what it forgets is
                      prefilled. Off: it keeps everything.
censored              F from Kaplan-Meier: gaps that never ended, and those still
                      open, count too.
use_eta               the client's own estimate of the gap, when it gives one.
redecide              with part of the gap over, F is conditional on having lasted so
                      long; off: the first plan's remainder.
ski_rental_fallback   B / price (2-competitive, no prediction) while predictions have
                      lately done clearly worse.
ski_rental_floor      never below B / price.
reprice               a TTL given while memory was free is decided anew once somebody
                      waits for memory; off: it stands, up to the longest TTL.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from pydantic import Field

from ttlcache.estimators.costs import RebuildCost
from ttlcache.estimators.gap_history import is_human_gap
from ttlcache.estimators.survival import EMPTY, SurvivalCurve, survival_of_sorted
from ttlcache.policies.base import Policy, PolicyOptions, View, remaining
from ttlcache.policies.cachettl import bounded, default_ttl_s
from ttlcache.types import Decision, GapKey, TurnFacts

#: Predictions must lose by this factor before ski rental takes over.
REGRET_MARGIN = 1.2
#: Largest share of gaps that counts as never ending: one return pays for at most nine.
MAX_NEVER = 0.9


class AdaptiveOptions(PolicyOptions):
    """Switches as in the module's docstring, and four numbers.

    min_keep_share: share of its blocks with less of which a pin goes as a whole; 1: as
        soon as it loses any.
    min_records: gaps (ended or not) above which a key's history is trusted.
    eta_margin: a client's estimate is stretched by this factor.
    min_outcomes: outcomes before the running regret may overrule predictions.
    """

    charge_what_is_used: bool = True
    price_memory: bool = True
    patient_stalls: bool = True
    whole_victims: bool = True
    lone_reloads: bool = True
    kept_share: bool = True
    censored: bool = True
    use_eta: bool = True
    redecide: bool = True
    ski_rental_fallback: bool = True
    ski_rental_floor: bool = False
    reprice: bool = True
    min_keep_share: float = Field(default=0.8, ge=0.0, le=1.0)
    min_records: int = Field(default=50, ge=0)
    eta_margin: float = Field(default=1.5, ge=1.0, allow_inf_nan=False)
    min_outcomes: int = Field(default=100, ge=1)


@dataclass(slots=True)
class RunningRegret:
    """Recent cost of predicted TTLs against ski rental's, on the same gaps."""

    planned_s: float = 0.0
    ski_s: float = 0.0
    outcomes: int = 0

    _FORGET = 0.99  # about the last 100 outcomes count

    def add(self, planned_s: float, ski_s: float) -> None:
        self.planned_s = self._FORGET * self.planned_s + planned_s
        self.ski_s = self._FORGET * self.ski_s + ski_s
        self.outcomes += 1

    @property
    def predictions_lose(self) -> bool:
        return self.planned_s > REGRET_MARGIN * self.ski_s


class _Terms(NamedTuple):
    """B and the price of memory, as this decision sees them."""

    benefit_s: float
    price: float

    @property
    def ski_s(self) -> float:
        return self.benefit_s / self.price


class Adaptive(Policy):
    """TTL by priced survival analysis, with ski rental as the safety net."""

    name = "adaptive"
    reads_eta = True
    learns_from = ("planned_s", "benefit_s", "price", "never")
    Options = AdaptiveOptions
    options: AdaptiveOptions

    def __init__(self, options: PolicyOptions | None = None) -> None:
        super().__init__(options)
        self._regret = RunningRegret()

    def decide(self, turn: TurnFacts, view: View) -> Decision:
        kept = None if self.options.kept_share else 1.0
        recovery = view.costs.expected_rebuild(turn.context_tokens, view.tier, kept)
        terms = self._terms(turn, view, recovery)
        inputs = {"benefit_s": terms.benefit_s, "price": terms.price}
        ttl_s, reason = self._ttl_s(turn, view, terms, inputs)
        options = self.options
        return Decision(
            ttl_s,
            reason,
            inputs,
            stall_wait_s=recovery.seconds if options.patient_stalls else 0.0,
            min_keep_share=self._whole_below(view),
            provisional=options.reprice and terms.price <= 0.0,
        )

    def _whole_below(self, view: View) -> float:
        if not self.options.whole_victims:
            return 0.0
        # What a tier below has comes back by a copy: its room is worth more.
        has_it = view.tier is not None and view.tier_has_copy
        return 1.0 if has_it else self.options.min_keep_share

    def _ttl_s(
        self, turn: TurnFacts, view: View, terms: _Terms, inputs: dict[str, float]
    ) -> tuple[float, str]:
        if terms.price <= 0.0:
            return math.inf, "memory-free"
        if terms.benefit_s <= 0.0:
            return 0.0, "no-benefit"
        eta_ttl_s = self._by_client_eta(turn, terms)
        if eta_ttl_s is not None:
            return eta_ttl_s, "client-eta"
        ttl_s, reason = self._by_history(turn, view, terms, inputs)
        if self.options.ski_rental_floor:
            ttl_s = max(ttl_s, remaining(terms.ski_s, turn))
        return ttl_s, reason

    def _terms(self, turn: TurnFacts, view: View, recovery: RebuildCost) -> _Terms:
        price = None
        if self.options.price_memory:
            price = view.costs.memory_price(view.pressure, turn.kv_blocks)
        if price is not None:
            alone = self.options.lone_reloads and view.tier_has_copy
            reload_weight = price.reload_weight if alone else price.weight
            benefit_s = price.weight * recovery.prefill_s
            benefit_s += reload_weight * recovery.reload_s
            return _Terms(bounded(benefit_s), price.per_s)
        delay_s = view.costs.queueing_delay_s * view.memoryfulness
        return _Terms(bounded(delay_s + recovery.seconds), view.costs.flat_price)

    def _by_client_eta(self, turn: TurnFacts, terms: _Terms) -> float | None:
        """Hold until the announced end if that wait is worth it; None: no estimate.

        An estimate already overrun says nothing more: back to the history.
        """
        if not self.options.use_eta or turn.tool_eta_s is None:
            return None
        left_s = turn.tool_eta_s - max(turn.waited_s, 0.0)
        if not left_s > 0.0:
            return None
        if terms.price * left_s > terms.benefit_s:
            return 0.0
        return left_s * self.options.eta_margin

    def _by_history(
        self, turn: TurnFacts, view: View, terms: _Terms, inputs: dict[str, float]
    ) -> tuple[float, str]:
        ski_s = inputs["ski_s"] = terms.ski_s
        curve, source = self._curve(turn.gap_key, view)
        if curve is None:
            # The paper's T_default, not ski rental: where clients say nothing the
            # history learns late that a program is over, and ski rental would hold the
            # last context of every one for all of B.
            return remaining(default_ttl_s(ski_s), turn), "default"
        planned_s = self._plan(curve, turn, terms)
        inputs["planned_s"] = planned_s
        inputs["never"] = curve.survival.item(-1) if len(curve.survival) else 0.0
        if self._distrusts_predictions():
            return remaining(ski_s, turn), "ski-rental:regret"
        return planned_s, source

    def _curve(self, key: GapKey, view: View) -> tuple[SurvivalCurve | None, str]:
        gaps, enough = view.gaps, self.options.min_records
        found = gaps.best_key(key, enough, with_censored=self.options.censored)
        if found is None and (is_human_gap(key) or gaps.total <= enough):
            return None, ""
        if self.options.censored:
            curve = gaps.survival(found, view.now_s)
        else:
            curve = survival_of_sorted(gaps.durations(found), EMPTY)
        return curve, "survival:global" if found is None else "survival:key"

    def _plan(self, curve: SurvivalCurve, turn: TurnFacts, terms: _Terms) -> float:
        conditional = self.options.redecide and turn.waited_s > 0.0
        if conditional:
            curve = curve.given_survival(turn.waited_s)
        costs_s = curve.held_s if self.options.charge_what_is_used else curve.times
        if len(costs_s) == 0:
            return 0.0  # nobody who waited this long is known to have come back
        # Lost on average, as a share of B: least where F B - price cost is most. Not to
        # hold loses all of B. In place, this is the hot path.
        losses = costs_s * (terms.price / terms.benefit_s)
        losses += curve.survival
        best = int(losses.argmin())
        ttl_s = curve.times.item(best) if losses.item(best) < 1.0 else 0.0
        return ttl_s if conditional else remaining(ttl_s, turn)

    def _distrusts_predictions(self) -> bool:
        return (
            self.options.ski_rental_fallback
            and self._regret.outcomes >= self.options.min_outcomes
            and self._regret.predictions_lose
        )

    def observe_outcome(
        self,
        key: GapKey,
        gap_s: float,
        ttl_s: float,
        inputs: Mapping[str, float] | None = None,
    ) -> None:
        """Charge both rules for the gap: memory held, and B where it ran out.

        An ending is known only when the program has been silent for very long, if its
        client says nothing; ski rental, which pays most for it, would seem to win until
        then. So each return pays for the share of gaps that the history expects to
        never end, and endings themselves pay nothing.
        """
        if inputs is None or "planned_s" not in inputs or math.isnan(gap_s):
            return
        never = min(inputs["never"], MAX_NEVER) if self.options.censored else 0.0
        if gap_s == math.inf and self.options.censored:
            return
        benefit_s, price = inputs["benefit_s"], inputs["price"]
        endings = never / (1.0 - never)

        def loss_s(tau_s: float) -> float:
            return _loss_s(gap_s, tau_s, benefit_s, price) + endings * price * tau_s

        self._regret.add(loss_s(inputs["planned_s"]), loss_s(benefit_s / price))


def _loss_s(gap_s: float, tau_s: float, benefit_s: float, price: float) -> float:
    """What holding for `tau_s` cost, the gap being known."""
    if tau_s < gap_s:  # missed; a gap that never ends loses nothing
        return price * tau_s + (benefit_s if gap_s < math.inf else 0.0)
    return price * gap_s
