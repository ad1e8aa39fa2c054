"""Our order behind LMCache's L1 eviction."""

from __future__ import annotations

from collections.abc import Callable

from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.eviction import EvictionPolicy
from lmcache.v1.distributed.internal_api import EvictionAction, EvictionDestination

from ttlcache_lmcache.retention.l1_tier import Tier


class TTLEvictionPolicy(EvictionPolicy):
    """Asks the tier when LMCache wants room.

    How much goes is the tier's to say too: `expected_ratio` is a hint that would empty
    a fifth of L1. What is created, touched and removed reaches the tier from the L1
    manager itself.
    """

    def __init__(
        self, tier: Tier, on_error: Callable[[str, BaseException], None]
    ) -> None:
        self._tier = tier
        self._on_error = on_error

    @property
    def name(self) -> str:
        return "ttlcache"

    def register_eviction_destination(self, destination: EvictionDestination) -> None:
        return

    def on_keys_reserved(self, keys: list[ObjectKey]) -> None:
        return

    def on_keys_created(self, keys: list[ObjectKey]) -> None:
        return

    def on_keys_touched(self, keys: list[ObjectKey]) -> None:
        return

    def on_keys_removed(self, keys: list[ObjectKey]) -> None:
        return

    def get_eviction_actions(
        self,
        expected_ratio: float,
        key_eligible_filter: Callable[[ObjectKey], bool] | None = None,
        cache_salt: str | None = None,
    ) -> list[EvictionAction]:
        try:
            keys = self._tier.to_evict(key_eligible_filter or (lambda _key: True))
        except Exception as error:  # noqa: BLE001 - LMCache's loop must live on
            self._on_error("eviction", error)
            return []
        if not keys:
            return []
        return [EvictionAction(EvictionDestination.DISCARD, keys)]
