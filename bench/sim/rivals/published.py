"""TTL rules of other papers, and of the authors' public code, as policies.

Registered under their names where the bench runs, as arms of simulations; a server
knows none of them.
"""

from __future__ import annotations

import math

import numpy as np
from pydantic import Field

from ttlcache import policies
from ttlcache.policies.base import Policy, PolicyOptions, View, remaining
from ttlcache.types import (
    FINAL_TOOL,
    USER_TOOL,
    Decision,
    Pressure,
    TurnFacts,
)


class ContinuumPublicOptions(PolicyOptions):
    """threshold_s: slowest mean gap that is pinned; ttl_s: for how long."""

    threshold_s: float = Field(default=2.0, ge=0.0)
    ttl_s: float = Field(default=2.0, ge=0.0)


class ContinuumPublic(Policy):
    """The rule of the authors' published code, not of their paper.

    Source: vllm-continuum, the code of arXiv 2511.02230: a tool whose mean gap is at
    most 2.0 s is pinned for 2.0 s, a slower one is not, an unknown one counts as 0 s,
    and a turn without a tool call is not pinned. Continuum v1 §4.5 describes the same
    rule with two thresholds, which are options here.

    The source's name of a tool is the first word of a shell command, hence the
    executable where there is one. Its mean is over all time; ours over the window.
    """

    name = "continuum-public"
    Options = ContinuumPublicOptions
    options: ContinuumPublicOptions

    def decide(self, turn: TurnFacts, view: View) -> Decision:
        if turn.gap_key.tool in (USER_TOOL, FINAL_TOOL):
            return Decision(0.0, "no-tool")
        gaps_s = view.gaps.durations(turn.gap_key)
        if len(gaps_s) == 0:
            return Decision(remaining(self.options.ttl_s, turn), "unknown-tool")
        mean_s = float(gaps_s.mean())
        inputs = {"mean_s": mean_s, "count": float(len(gaps_s))}
        if mean_s > self.options.threshold_s:
            return Decision(0.0, "slow-tool", inputs)
        return Decision(remaining(self.options.ttl_s, turn), "fast-tool", inputs)


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
    """Continuum's first version: TTL from an empirical Bernstein bound (v1 §4.2-4.3).

        TTL = T_default^2 / B * (1 + alpha * AvgTurns)

    B bounds the mean gap of the tool from above with confidence 1 - delta: short and
    certain gaps give long pins. B is the tool's own bound from `n_min` records on, else
    that of all tools, else T_default itself.
    """

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


def empirical_bernstein(
    mean: float, std: float, count: int, bound: float, delta: float
) -> float:
    """Upper bound of a mean that holds with probability 1 - delta.

    mean + sqrt(2 std^2 L / n) + 3 bound L / n with L = ln(3 / delta), for values
    in [0, bound] (Maurer & Pontil 2009, as in Continuum v1 §4.2).
    """
    log_term = math.log(3.0 / delta)
    spread = math.sqrt(2.0 * std * std * log_term / count)
    return mean + spread + 3.0 * bound * log_term / count


class InferCeptOptions(PolicyOptions):
    """chunk_tokens: prefill chunk size. swap_hidden: share of a swap that overlaps."""

    chunk_tokens: int = Field(default=2048, ge=1)
    swap_hidden: float = Field(default=0.0, ge=0.0, le=1.0)


class InferCept(Policy):
    """InferCept: keep, swap or discard an interrupted request by least waste.

    Source: arXiv 2402.01869 §4. In token-seconds, for a context of C tokens while
    C_other tokens of others run:

        preserve = T_int * C
        discard  = T_fwd(C) * C / 2 + n * T_fwd(C / n) * C_other     (n chunks)
        swap     = 2 * T_swap(C) * C_other                           (out and in)

    InferCept takes the time already waited for T_int and picks the least at every
    iteration. As a TTL: hold until preserving has wasted as much as the better of the
    other two would. With asynchronous offload only the part of a swap that is not
    hidden behind the running batch is waste.
    """

    name = "infercept"
    Options = InferCeptOptions
    options: InferCeptOptions

    def decide(self, turn: TurnFacts, view: View) -> Decision:
        tokens = turn.context_tokens
        if tokens <= 0:
            return Decision(0.0, "empty")
        others = _running_tokens(turn, view.pressure)
        discard = self._discard_waste(tokens, others, view)
        swap = self._swap_waste(tokens, others, view)
        choice = "swap" if swap < discard else "discard"
        ttl_s = min(discard, swap) / tokens
        inputs = {"discard": discard, "swap": swap, "other_tokens": others}
        return Decision(remaining(ttl_s, turn), f"then:{choice}", inputs)

    def _discard_waste(self, tokens: int, others: float, view: View) -> float:
        chunks = math.ceil(tokens / self.options.chunk_tokens)
        chunk_s = view.costs.prefill_s(tokens / chunks)
        whole_s = view.costs.prefill_s(tokens)
        return whole_s * tokens / 2.0 + chunks * chunk_s * others

    def _swap_waste(self, tokens: int, others: float, view: View) -> float:
        """inf where no tier is known to give anything back."""
        swap_s = view.costs.reload_s(view.tier or "cpu", tokens)
        if math.isinf(swap_s):
            return math.inf
        return 2.0 * swap_s * (1.0 - self.options.swap_hidden) * others


def _running_tokens(turn: TurnFacts, pressure: Pressure) -> float:
    """Tokens of the other requests running now: used blocks, but pins' and its own."""
    if turn.kv_blocks <= 0:
        return 0.0
    used = pressure.pool_blocks - pressure.free_blocks - pressure.pinned_blocks
    if turn.waited_s <= 0.0:  # its request still holds them; later a pin does
        used -= turn.kv_blocks
    return max(used, 0) * (turn.context_tokens / turn.kv_blocks)


POLICIES: tuple[type[Policy], ...] = (ContinuumV1, ContinuumPublic, InferCept)
for _policy in POLICIES:
    policies.register(_policy.name, f"{__name__}:{_policy.__name__}")
