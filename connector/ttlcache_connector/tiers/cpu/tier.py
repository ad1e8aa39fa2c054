"""Host memory of the workers as one of the lower tiers."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from vllm import envs
from vllm.platforms import current_platform

from ttlcache.config import TTLCacheConfig
from ttlcache_connector.log import logger
from ttlcache_connector.tiers.base import SchedulerTier, TierFactory, WorkerTier
from ttlcache_connector.tiers.cpu import budget

log = logger(__name__)


class CPU(TierFactory):
    """`lower_tier: cpu`."""

    def kv_cache_layout(self, device_type: str) -> str | None:
        """On a GPU all layers of a block in one piece: one copy a block."""
        if device_type != "cuda":
            return None
        # On compute capability 10.x FlashInfer takes no other of that kind.
        return "BLHNC" if current_platform.is_device_capability_family(100) else "BLNHC"

    def may_sleep(self, extra_config: Mapping[str, Any]) -> bool:
        """Not in vLLM's own process: there a sleep waits for no copy."""
        return envs.VLLM_ENABLE_V1_MULTIPROCESSING

    def scheduler_half(
        self, config: TTLCacheConfig, vllm_config: Any, kv_cache_config: Any
    ) -> SchedulerTier:
        from ttlcache_connector.tiers.cpu.scheduler import CPUSchedulerTier

        blocks = budget.count_blocks(config, vllm_config, kv_cache_config)
        return CPUSchedulerTier(config, vllm_config, kv_cache_config, blocks)

    def worker_half(
        self, config: TTLCacheConfig, vllm_config: Any, kv_cache_config: Any
    ) -> WorkerTier:
        from ttlcache_connector.tiers.cpu.worker import CPUWorkerTier

        blocks = budget.count_blocks(config, vllm_config, kv_cache_config)
        return CPUWorkerTier(kv_cache_config, blocks)


def resolve_auto(vllm_config: Any, config: TTLCacheConfig) -> dict[str, Any]:
    """What `lower_tier` "auto" and `cpu_gb` None stand for.

    Called where engines are started, which knows how many share this host; they do not.
    """
    tier: str = config.lower_tier
    if tier == "auto":
        is_allowed = config.cpu_gb is not None or _is_default_with(vllm_config)
        tier = tier_on_this_machine(config) if is_allowed else "none"
    if tier != "cpu":
        return {"lower_tier": tier}
    parallel = vllm_config.parallel_config
    cpu_gb = config.cpu_gb or budget.default_gb(parallel)
    wanted_gb = cpu_gb * max(parallel.data_parallel_size_local, 1)
    free_gb = budget.available_bytes() / 1e9
    # Ranks take theirs at the same time: each alone would find enough.
    if _has_one_host(parallel) and wanted_gb > free_gb:
        sizes = f"{wanted_gb:.3g} GB of host memory wanted, {free_gb:.3g} GB available"
        log.error("ttlcache: no CPU tier: %s", sizes)
        return {"lower_tier": "none"}
    return {"lower_tier": tier, "cpu_gb": cpu_gb}


def tier_on_this_machine(config: TTLCacheConfig) -> str:
    """What "auto" is unless the model, vLLM's options or free memory forbid it."""
    if config.cpu_gb is not None:
        return "none" if config.observes else "cpu"
    # Policy "none" is plain vLLM.
    if config.policy in ("none", "observe") or not current_platform.is_cuda():
        return "none"
    if find_spec("cupy") is None:
        log.warning("ttlcache: no CPU tier without CuPy (ttlcache's extra 'cuda')")
        return "none"
    return "cpu"


def _is_default_with(vllm_config: Any) -> bool:
    """One host, free memory, and nothing beside us that moves KV. Recurrent models are
    untested on GPUs."""
    transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
    model = vllm_config.model_config
    return (
        (transfer.kv_connector, transfer.kv_role) == ("TTLConnector", "kv_both")
        and model.runner_type != "pooling"
        and not model.has_inner_state
        and _has_one_host(parallel)
        and envs.VLLM_ENABLE_V1_MULTIPROCESSING
        and all(getattr(parallel, option, 1) == 1 for option in budget.MUST_BE_ONE)
        and budget.default_gb(parallel) >= budget.MIN_GB
    )


def _has_one_host(parallel_config: Any) -> bool:
    """Ray's may be on several."""
    is_ray = parallel_config.distributed_executor_backend == "ray"
    return parallel_config.nnodes == 1 and not is_ray
