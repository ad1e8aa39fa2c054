"""Admission control by its configured name."""

from __future__ import annotations

from collections.abc import Callable

from ttlcache.config import PROGRAM_ORDERINGS, TTLCacheConfig, ordering_in_force
from ttlcache.scheduling.admission import AdmissionControl, AdmitAll, WorkingSet
from ttlcache.scheduling.growth import RoomToGrow


def create(
    config: TTLCacheConfig, block_tokens: int, computed_share: Callable[[], float]
) -> AdmissionControl:
    """What `config.admission` names.

    computed_share: of what a lost context costs, the part that is prefill.
    """
    name = in_force(config)
    if name == "working-set":
        return WorkingSet(config.admission_half_life_s)
    if name == "room-to-grow":
        return RoomToGrow(config.growth_share, block_tokens, computed_share)
    return AdmitAll()


def in_force(config: TTLCacheConfig, *, above_tier: bool | None = None) -> str:
    """What "auto" stands for.

    Other policies stand for what others published, and admit all.
    above_tier: as in `ordering_in_force`.
    """
    if config.admission != "auto":
        return config.admission
    ordering = ordering_in_force(config, above_tier=above_tier)
    ours = config.policy == "adaptive" and ordering in PROGRAM_ORDERINGS
    return "room-to-grow" if ours else "none"
