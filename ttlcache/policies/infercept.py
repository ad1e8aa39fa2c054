"""InferCept: keep, swap or discard an interrupted request by least waste.

Source: arXiv 2402.01869 §4 (formulae in RIVALS.md §4.2). In token-seconds, for a
context of C tokens while C_other tokens of others run:

    preserve = T_int * C
    discard  = T_fwd(C) * C / 2 + n * T_fwd(C / n) * C_other     (n chunks)
    swap     = 2 * T_swap(C) * C_other                           (out and in)

InferCept takes the time already waited for T_int and picks the least at every
iteration. As a TTL: hold until preserving has wasted as much as the better of the
other two would. With asynchronous offload only the part of a swap that is not
hidden behind the running batch is waste.
"""

from __future__ import annotations

import math

from pydantic import Field

from ttlcache.policies.base import Policy, PolicyOptions, View, remaining
from ttlcache.types import Decision, Pressure, TurnFacts


class InferCeptOptions(PolicyOptions):
    """chunk_tokens: prefill chunk size. swap_hidden: share of a swap that overlaps."""

    chunk_tokens: int = Field(default=2048, ge=1)
    swap_hidden: float = Field(default=0.0, ge=0.0, le=1.0)


class InferCept(Policy):
    """TTL = min(WasteDiscard, WasteSwap) / C."""

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
        tiers = (view.tier,) if view.tier is not None else view.costs.tiers
        swap_s = min((view.costs.reload_s(t, tokens) for t in tiers), default=math.inf)
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
