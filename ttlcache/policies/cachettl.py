"""CacheTTL v4 (arXiv 2511.02230 v4, §4.1-4.2).

    tau* = argmax over tau in {0} and the recorded gaps of P(tau, f) * B - tau
    B    = T * eta + PrefillReload(r)

P is the empirical distribution of the tool's gaps, T the mean queueing delay of
returns whose KV was gone, eta the memoryfulness of the workload. MemUsage(r) / M
multiplies every term and cancels.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from pydantic import Field

from ttlcache.estimators.gap_history import is_human_gap
from ttlcache.estimators.survival import FloatArray
from ttlcache.policies.base import Policy, PolicyOptions, View, remaining
from ttlcache.types import FINAL_GAP, Decision, GapKey, TurnFacts

#: A benefit beyond this is no longer told apart: it keeps 0 * inf out of the sums.
MAX_BENEFIT_S = 1e12


class CacheTTLOptions(PolicyOptions):
    """k: records above which an empirical distribution is trusted."""

    k: int = Field(default=100, ge=0)


class _Sample(NamedTuple):
    """Whose gaps to read: a key (None: all tools), out of how many records."""

    source: str
    key: GapKey | None
    records: int


class CacheTTL(Policy):
    """The utility-maximising TTL of the paper, with its cold start.

    An output without a tool call is not kept. A call that asks a person reads its own
    history only once that has more than k records; until then the paper's cold start
    applies. Its distribution counts the gaps that never ended, which the paper, having
    records of returns only, leaves out: otherwise the rare reply would stand for all.
    T_default is of the turn's own prefill and of the mean T until now; there it is one
    number for all.
    """

    name = "cachettl"
    Options = CacheTTLOptions
    options: CacheTTLOptions

    def decide(self, turn: TurnFacts, view: View) -> Decision:
        if turn.gap_key == FINAL_GAP:
            return Decision(0.0, "no-tool-call")
        recovery_s = view.recovery_s(turn)
        delay_s = view.costs.queueing_delay_s
        sample = self._sample(turn.gap_key, view)
        # The cold start assumes a fully memoryful workload.
        eta = view.memoryfulness if sample is not None else 1.0
        benefit_s = bounded(delay_s * eta + recovery_s)
        if sample is None:
            source, ttl_s, records = "default", default_ttl_s(benefit_s), 0
        else:
            source, records = f"ecdf:{sample.source}", sample.records
            ttl_s = best_ttl_s(view.gaps.durations(sample.key), records, benefit_s)
        inputs = {
            "benefit_s": benefit_s,
            "delay_s": delay_s,
            "eta": eta,
            "recovery_s": recovery_s,
            "records": float(records),
        }
        return Decision(remaining(ttl_s, turn), source, inputs)

    def _sample(self, key: GapKey, view: View) -> _Sample | None:
        k, gaps = self.options.k, view.gaps
        if is_human_gap(key):
            records = gaps.count(key, with_censored=True)
            if records > k:
                return _Sample("human", key, records)
        if gaps.count() <= k:
            return None
        found = None if is_human_gap(key) else gaps.best_key(key, k)
        if found is None:
            return _Sample("global", None, gaps.count())
        return _Sample("tool", found, gaps.count(found))


def bounded(benefit_s: float) -> float:
    """The benefit as a finite number; NaN (0 * inf upstream) counts as nothing."""
    if -MAX_BENEFIT_S <= benefit_s <= MAX_BENEFIT_S:
        return benefit_s
    return 0.0 if math.isnan(benefit_s) else math.copysign(MAX_BENEFIT_S, benefit_s)


def default_ttl_s(benefit_s: float) -> float:
    """T_default: argmax of (1 - exp(-tau)) B - tau, hence ln B where B > 1."""
    return math.log(benefit_s) if benefit_s > 1.0 else 0.0


def best_ttl_s(gaps_s: FloatArray, records: int, benefit_s: float) -> float:
    """First maximum of P(tau) B - tau over `gaps_s` (ascending) and 0.

    P(gaps_s[i]) = (i + 1) / records at the last of equal gaps; the earlier ones are
    worth less. Everything is times `records`, so that round numbers stay exact and
    ties are ties.
    """
    if benefit_s <= 0.0 or len(gaps_s) == 0:
        return 0.0
    values = np.arange(1, len(gaps_s) + 1) * benefit_s
    values -= gaps_s * float(records)
    best = int(values.argmax())
    # tau = 0 is worth P(0) B: nothing, unless gaps of 0 s are among the records.
    return gaps_s.item(best) if values.item(best) > 0.0 else 0.0
