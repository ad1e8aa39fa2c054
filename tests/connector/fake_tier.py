"""A lower tier for unit tests; the real one runs in tests/e2e."""

from __future__ import annotations

import math
from typing import Any

from ttlcache_connector.tiers.base import NoTier, TierMetadata, TurnEnd


class FakeTier(NoTier):
    """Says yes to everything, and copies when it is told to."""

    stores_suffixes = False

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.up = True
        self.found: Any = (0, False)
        self.asked = True  # whether it really looks
        self.fails: set[str] = set()
        self.orders: list[TierMetadata] = []
        self.ends: list[TurnEnd] = []
        self.settled: set[str] = set()  # stored, or not wanted there
        self.newly_settled: list[str] = []
        self.events: list[str] = []
        #: Of the others, where what is to be copied begins, and what is below.
        self.due: dict[str, int] = {}
        self.below: dict[str, int] = {}
        #: Tokens at their beginning that others brought down.
        self.known: dict[str, int] = {}
        #: What `count_unstored` says; of the others: nothing.
        self.unknown: dict[str, int] = {}

    def is_up(self) -> bool:
        return self.up

    def arrive(self, request, *, has_pin):
        self.calls.append(("arrive-pinned" if has_pin else "arrive", _id(request)))

    def match(self, request, hit_tokens, stored_tokens=math.inf):
        self._maybe_fail("match")
        self.stored_tokens = stored_tokens
        return self.found

    def was_looked_up(self, request_id):
        return self.asked

    def allocated(self, request, blocks, loaded_tokens):
        self._maybe_fail("allocated")

    def build_metadata(self, output):
        self._maybe_fail("build_metadata")
        self.orders.append(TierMetadata("orders"))
        return self.orders[-1]

    def take_settled(self):
        settled, self.newly_settled = self.newly_settled, []
        return settled

    def take_events(self):
        events, self.events = self.events, []
        return events

    def has_unstored(self, request_id):
        return self.up and request_id not in self.settled

    def demote(self, request_id, start=0):
        self.calls.append(("demote", request_id))
        if not self.has_unstored(request_id) or start >= self.below.get(
            request_id, math.inf
        ):
            return None
        self.due[request_id] = min(start, self.due.get(request_id, start))
        return max(start, self.known.get(request_id, 0))

    def has_suffix(self, request_id):
        return self.below.get(request_id, 0) > 0

    def count_unstored(self, request_id, start, end):
        return self.unknown.get(request_id, 0)

    def copy(self, request_id):
        """The copy that `demote` ordered begins: the tier takes over."""
        start = self.due.pop(request_id, 0)
        self.below[request_id] = start
        if not start:
            self.settled.add(request_id)
        self.newly_settled.append(request_id)

    def report_turn(self, turn):
        self._maybe_fail("report_turn")
        self.ends.append(turn)

    def drop(self, request_id):
        self.calls.append(("drop", request_id))
        self.settled.add(request_id)

    def of(self, name: str) -> list[str]:
        return [request_id for call, request_id in self.calls if call == name]

    def _maybe_fail(self, name: str) -> None:
        if name in self.fails:
            raise RuntimeError(f"{name} is broken")


def settle(engine: Any, tier: FakeTier, request_id: str) -> None:
    """The tier needs the request's blocks no longer, as the next step would find."""
    tier.newly_settled.append(request_id)
    engine.connector.scheduler_role.steps.tier_settled()


def copy(engine: Any, tier: FakeTier, request_id: str) -> None:
    """The request's copy begins, as the next step would find."""
    tier.copy(request_id)
    engine.connector.scheduler_role.steps.tier_settled()


def _id(request: Any) -> str:
    return str(request.request_id)


def extra(**options: Any) -> dict[str, Any]:
    """A connector that pins every turn for five seconds, above the tier."""
    hold = {"policy": "fixed", "policy_options": {"ttl_s": 5.0}}
    return {
        **hold,
        "max_pinned_fraction": 1.0,
        "lower_tier": "lmcache",
        "demote": "on-expiry",
        **options,
    }
