"""No retention: an ended turn is a prefix cache hit until vLLM takes its blocks.

The baseline of every table.
"""

from __future__ import annotations

from ttlcache.policies.base import Policy, View
from ttlcache.types import Decision, TurnFacts


class NoRetention(Policy):
    """TTL 0 for everybody."""

    name = "none"

    def decide(self, turn: TurnFacts, view: View) -> Decision:
        return Decision(0.0, "none")
