"""Which lower tiers there are.

A new one: its own files, a line in `TIERS`, and its name in `ttlcache.config`.
"""

from __future__ import annotations

from typing import Any

from ttlcache.config import TTLCacheConfig
from ttlcache_connector.log import logger
from ttlcache_connector.tiers.base import LowerTier, SchedulerTier, WorkerTier
from ttlcache_connector.tiers.cpu.tier import CPU
from ttlcache_connector.tiers.lmcache.tier import LMCache

log = logger(__name__)

#: By their names in `lower_tier`, of which `ttlcache.config` has the list.
TIERS: dict[str, LowerTier] = {
    "none": LowerTier(),
    "cpu": CPU(),
    "lmcache": LMCache(),
}


def check(config: TTLCacheConfig) -> None:
    """
    Raises:
        ConfigError: what the tier needs is not installed.
        UnsupportedEngineError: versions that were not tested.
    """
    TIERS[config.lower_tier].check(allow_untested=config.allow_untested_vllm)


def scheduler_tier(
    config: TTLCacheConfig, vllm_config: Any, kv_cache_config: Any
) -> SchedulerTier:
    """The scheduler's half of the configured tier.

    Raises:
        ConfigError: it cannot be used as configured.
    """
    tier = TIERS[config.lower_tier]
    if why := tier.unsupported_reason(kv_cache_config):
        log.warning(
            "ttlcache: no lower tier for this model, what pins lose is prefilled: %s",
            why,
        )
        return SchedulerTier()
    return tier.scheduler_half(config, vllm_config, kv_cache_config)


def worker_tier(
    config: TTLCacheConfig, vllm_config: Any, kv_cache_config: Any
) -> WorkerTier:
    """The worker's half of the configured tier.

    Raises:
        ConfigError: it cannot be used as configured.
    """
    tier = TIERS[config.lower_tier]
    if tier.unsupported_reason(kv_cache_config):
        return WorkerTier()
    return tier.worker_half(config, vllm_config, kv_cache_config)
