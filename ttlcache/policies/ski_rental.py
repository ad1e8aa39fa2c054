"""Ski rental: hold as long as losing the pin would cost, and no longer.

Renting is holding memory, buying is recovering the context. Stopping once the rent
paid equals the price costs at most twice what a clairvoyant would pay, for any gap
and with no prediction (Karlin et al. 1988, "Competitive snoopy caching").
"""

from __future__ import annotations

from ttlcache.policies.base import Policy, View, remaining
from ttlcache.types import Decision, TurnFacts


class SkiRental(Policy):
    """TTL = PrefillReload(r) in seconds."""

    name = "ski-rental"

    def decide(self, turn: TurnFacts, view: View) -> Decision:
        recovery_s = view.recovery_s(turn)
        return Decision(
            remaining(recovery_s, turn), "ski-rental", {"recovery_s": recovery_s}
        )
