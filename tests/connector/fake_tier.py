"""A lower tier for unit tests; the real one runs in tests/e2e."""

from __future__ import annotations

from typing import Any

from ttlcache_connector.tiers.base import (
    Match,
    SchedulerTier,
    TierDemotions,
    TierEvents,
    TierMetadata,
    TurnEnd,
)


class FakeTier(SchedulerTier, TierDemotions):
    """Says yes to everything, and copies when it is told to."""

    def __init__(self) -> None:
        self.demotions = self
        self.calls: list[tuple[str, str]] = []
        self.up = True
        self.found: int | None = 0
        self.asked = True  # whether it really looks
        self.fails: set[str] = set()
        self.ends: list[TurnEnd] = []
        self.releasable: set[str] = set()  # stored, or not wanted there
        self.events = TierEvents()
        self.due: list[str] = []  # to be copied

    def is_up(self) -> bool:
        return self.up and not self.is_off

    def on_arrival(self, request, *, has_pin):
        self.calls.append(("arrive-pinned" if has_pin else "arrive", _id(request)))

    def match(self, request, hit_tokens, lookup_limit_tokens):
        self._maybe_fail("match")
        self.lookup_limit_tokens = lookup_limit_tokens
        return Match(self.found, self.asked)

    def update_state_after_alloc(self, request, blocks, external_tokens):
        self._maybe_fail("update_state_after_alloc")

    def build_metadata(self, output):
        self._maybe_fail("build_metadata")
        return TierMetadata("orders")

    def take_events(self):
        events, self.events = self.events, TierEvents()
        return events

    def can_be_demoted(self, request_id):
        return self.is_up() and request_id not in self.releasable

    def demote(self, request_id):
        self.calls.append(("demote", request_id))
        if not self.can_be_demoted(request_id):
            return False
        self.due.append(request_id)
        return True

    def copy(self, request_id):
        """The copy that `demote` ordered begins: the tier takes over."""
        if request_id in self.due:
            self.due.remove(request_id)
        self.releasable.add(request_id)
        self.events.releasable.append(request_id)

    def report_turn(self, turn):
        self._maybe_fail("report_turn")
        self.ends.append(turn)

    def drop(self, request_id):
        self.calls.append(("drop", request_id))
        self.releasable.add(request_id)

    def of(self, name: str) -> list[str]:
        return [request_id for call, request_id in self.calls if call == name]

    def _maybe_fail(self, name: str) -> None:
        if name in self.fails:
            raise RuntimeError(f"{name} is broken")


def settle(engine: Any, tier: FakeTier, request_id: str) -> None:
    """The tier needs the request's blocks no longer, as the next step would find."""
    tier.events.releasable.append(request_id)
    engine.role.steps.apply_tier_events()


def copy(engine: Any, tier: FakeTier, request_id: str) -> None:
    """The request's copy begins, as the next step would find."""
    tier.copy(request_id)
    engine.role.steps.apply_tier_events()


def _id(request: Any) -> str:
    return str(request.request_id)


def extra(**options: Any) -> dict[str, Any]:
    """A connector that pins every turn for five seconds, above the tier."""
    return {
        "policy": "fixed",
        "policy_options": {"ttl_s": 5.0},
        "max_pinned_fraction": 1.0,
        "lower_tier": "lmcache",
        "demote": "on-expiry",
        **options,
    }
