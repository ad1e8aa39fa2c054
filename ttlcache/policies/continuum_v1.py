"""Continuum's first version: TTL from an empirical Bernstein bound (v1 §4.2-4.3).

    TTL = T_default^2 / B * (1 + alpha * AvgTurns)

B bounds the mean gap of the tool from above with confidence 1 - delta: short and
certain gaps give long pins. B is the tool's own bound from `n_min` records on, else
that of all tools, else T_default itself.
"""

from __future__ import annotations

import numpy as np
from pydantic import Field

from ttlcache.estimators.survival import empirical_bernstein
from ttlcache.policies.base import Policy, PolicyOptions, View, remaining
from ttlcache.types import Decision, TurnFacts


class ContinuumV1Options(PolicyOptions):
    """The source names these and gives no values; ours are stated, not theirs.

    delta: the bound may fail with this probability. b_s: longest gap in seconds.
    n_min: records needed. t_default_s: TTL scale in seconds. alpha: weight of turns.
    """

    delta: float = Field(default=0.05, gt=0.0, lt=1.0)
    b_s: float = Field(default=30.0, gt=0.0, allow_inf_nan=False)
    n_min: int = Field(default=10, ge=1)
    t_default_s: float = Field(default=2.0, gt=0.0, allow_inf_nan=False)
    alpha: float = Field(default=0.1, ge=0.0, allow_inf_nan=False)


class ContinuumV1(Policy):
    """TTL inversely proportional to an upper bound of the tool's mean gap."""

    name = "continuum-v1"
    Options = ContinuumV1Options
    options: ContinuumV1Options

    def decide(self, turn: TurnFacts, view: View) -> Decision:
        bound_s, source = self._bound(turn, view)
        scale = 1.0 + self.options.alpha * view.avg_turns
        ttl_s = self.options.t_default_s**2 / bound_s * scale
        inputs = {"bound_s": bound_s, "avg_turns": view.avg_turns}
        return Decision(remaining(ttl_s, turn), f"bernstein:{source}", inputs)

    def _bound(self, turn: TurnFacts, view: View) -> tuple[float, str]:
        options = self.options
        if view.gaps.count() < options.n_min:
            return options.t_default_s, "default"
        key = view.gaps.best_key(turn.gap_key, options.n_min - 1)
        gaps_s = view.gaps.durations(key)
        count = len(gaps_s)
        mean_s = float(gaps_s.mean())
        std_s = float(np.std(gaps_s, ddof=1)) if count > 1 else 0.0
        bound_s = empirical_bernstein(
            mean_s, std_s, count, bound=options.b_s, delta=options.delta
        )
        return bound_s, "tool" if key is not None else "global"
