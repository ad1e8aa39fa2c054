"""One constant TTL for every gap; Continuum v1 §4.5 calls it T_pin."""

from __future__ import annotations

from pydantic import Field

from ttlcache.policies.base import Policy, PolicyOptions, View, remaining
from ttlcache.types import Decision, TurnFacts


class FixedOptions(PolicyOptions):
    """ttl_s: seconds to hold every finished turn."""

    ttl_s: float = Field(default=2.0, ge=0.0, allow_inf_nan=True)


class FixedTTL(Policy):
    """The given TTL, whatever comes next."""

    name = "fixed"
    Options = FixedOptions
    options: FixedOptions

    def decide(self, turn: TurnFacts, view: View) -> Decision:
        return Decision(remaining(self.options.ttl_s, turn), "fixed")
