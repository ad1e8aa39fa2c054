"""Host memory of the workers as one of the lower tiers."""

from __future__ import annotations

from typing import Any

from ttlcache.config import TTLCacheConfig
from ttlcache_connector.tiers.base import LowerTier, SchedulerTier, WorkerTier
from ttlcache_connector.tiers.cpu.budget import count_blocks


class CPU(LowerTier):
    """`lower_tier: cpu`."""

    def kv_cache_layout(self, device_type: str) -> str | None:
        """On a GPU all layers of a block in one piece: one copy a block."""
        return "BLNHC" if device_type == "cuda" else None

    def scheduler_half(
        self, config: TTLCacheConfig, vllm_config: Any, kv_cache_config: Any
    ) -> SchedulerTier:
        from ttlcache_connector.tiers.cpu.scheduler import CPUSchedulerTier

        blocks = count_blocks(config, vllm_config, kv_cache_config)
        return CPUSchedulerTier(config, vllm_config, kv_cache_config, blocks)

    def worker_half(
        self, config: TTLCacheConfig, vllm_config: Any, kv_cache_config: Any
    ) -> WorkerTier:
        from ttlcache_connector.tiers.cpu.worker import CPUWorkerTier

        blocks = count_blocks(config, vllm_config, kv_cache_config)
        return CPUWorkerTier(kv_cache_config, blocks)
