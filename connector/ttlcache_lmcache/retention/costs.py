"""What memory of L1 costs: what somebody else's KV would yield in the same place."""

from __future__ import annotations

from collections.abc import Mapping

from ttlcache.estimators.costs import CostModel, MemoryPrice
from ttlcache.estimators.survival import SlidingMean
from ttlcache.types import Pressure

_WINDOW = 1000


class TierCosts(CostModel):
    """The core's costs with another price of memory.

    In GPU memory, KV that is held back delays requests. In L1 nobody waits for memory:
    a context that stays only displaces another, whose loss costs B once per gap. So

        price = mean B / mean gap,

    in seconds of recovery per second of holding. Under it a program is worth keeping
    while it is likelier to return in the next second than the average program. It
    holds whether L1 is full or not, because a TTL is read only when it is: by the
    eviction, and by the sweep above `demote_above`. 0 until the first gap ended.
    """

    def __init__(self, profile: Mapping[str, object] | None = None) -> None:
        super().__init__(profile)
        self._benefit_s = SlidingMean(_WINDOW)
        self._gap_s = SlidingMean(_WINDOW)

    def observe_benefit(self, recovery_s: float) -> None:
        self._benefit_s.observe(recovery_s)

    def observe_gap(self, gap_s: float) -> None:
        self._gap_s.observe(gap_s)

    def memory_price(self, pressure: Pressure, kv_blocks: float) -> MemoryPrice:
        gap_s = self._gap_s.value
        per_s = self._benefit_s.value / gap_s if gap_s > 0.0 else 0.0
        return MemoryPrice(per_s, 1.0)
