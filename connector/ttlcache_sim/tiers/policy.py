"""Any policy, told which lower tier holds the turn that it decides about.

The controller knows nothing of the simulated tiers: its own view says that there are
none, and that a turn would have to be copied first.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field

from ttlcache import policies
from ttlcache.policies.base import Policy, PolicyOptions, View
from ttlcache.types import Decision, TurnFacts
from ttlcache_sim.tiers import link

NAME = "sim-tiered"
_TARGET = f"{__name__}:TierAware"


class TierAwareOptions(PolicyOptions):
    """policy, policy_options: of the policy that decides."""

    policy: str
    policy_options: dict[str, Any] = Field(default_factory=dict)


class TierAware(Policy):
    """Fills `View.tier` from the simulated tiers."""

    name = NAME
    Options = TierAwareOptions
    options: TierAwareOptions

    def __init__(self, options: PolicyOptions | None = None) -> None:
        super().__init__(options)
        self._policy = policies.create(self.options.policy, self.options.policy_options)
        self._store = link.current_store()

    def decide(self, turn: TurnFacts, view: View) -> Decision:
        tier = self._store.holder(turn.program_id) if self._store else None
        # The simulated tiers are written through, whatever the connector was told.
        return self._policy.decide(turn, view._replace(tier=tier, tier_has_copy=True))


def tiered(extra: dict[str, Any]) -> dict[str, Any]:
    """The same connector settings with the policy told about tiers."""
    policies.register(NAME, _TARGET)
    options = {
        "policy": extra["policy"],
        "policy_options": extra.get("policy_options", {}),
    }
    return {**extra, "policy": NAME, "policy_options": options}
