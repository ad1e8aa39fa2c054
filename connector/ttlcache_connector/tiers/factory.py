"""Which lower tier is configured."""

from __future__ import annotations

from typing import Any

from ttlcache.config import TTLCacheConfig
from ttlcache.errors import ConfigError
from ttlcache_connector.log import logger
from ttlcache_connector.tiers import cpu
from ttlcache_connector.tiers.base import SchedulerTier, WorkerTier

log = logger(__name__)


def scheduler_tier(
    config: TTLCacheConfig, vllm_config: Any, kv_cache_config: Any
) -> SchedulerTier:
    """The scheduler's half of the configured tier.

    Raises:
        ConfigError: it cannot be used as configured.
    """
    if config.lower_tier == "none":
        return SchedulerTier()  # keeps nothing
    if config.lower_tier == "cpu":
        if why := cpu.unsupported_reason(vllm_config):
            raise ConfigError(f"lower_tier 'cpu' does not go with {why}")
        return cpu.CPUSchedulerTier(config, vllm_config, kv_cache_config)
    # LMCache is imported only where a lower tier is asked for.
    from ttlcache_connector.tiers import lmcache

    if why := lmcache.unsupported_reason(kv_cache_config):
        log.warning(
            "ttlcache: no lower tier for this model, what pins lose is prefilled: %s",
            why,
        )
        return SchedulerTier()  # keeps nothing
    return lmcache.LMCacheSchedulerTier(config, vllm_config, kv_cache_config)


def worker_tier(
    config: TTLCacheConfig, vllm_config: Any, kv_cache_config: Any
) -> WorkerTier | None:
    """The worker's half of the configured tier, None where the scheduler has none.

    Raises:
        ConfigError: it cannot be used as configured.
    """
    if config.lower_tier == "none":
        return None
    if config.lower_tier == "cpu":
        return cpu.CPUWorkerTier(config, vllm_config, kv_cache_config)
    # LMCache is imported only where a lower tier is asked for.
    from ttlcache_connector.tiers import lmcache

    if lmcache.unsupported_reason(kv_cache_config):
        return None
    return lmcache.LMCacheWorkerTier(config, vllm_config, kv_cache_config)
