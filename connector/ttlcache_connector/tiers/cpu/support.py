"""How large the tier is, and which engines it cannot serve."""

from __future__ import annotations

from typing import Any

from ttlcache.config import TTLCacheConfig
from ttlcache.errors import ConfigError


def unsupported_reason(vllm_config: Any) -> str:
    """Why this engine's KV cannot be kept, empty if it can."""
    parallel = vllm_config.parallel_config
    if parallel.pipeline_parallel_size > 1:
        # Ranks with different layers have blocks of different sizes.
        return "pipeline parallelism"
    if getattr(parallel, "decode_context_parallel_size", 1) > 1:
        return "decode context parallelism"
    if getattr(parallel, "prefill_context_parallel_size", 1) > 1:
        return "prefill context parallelism"
    return ""


def block_bytes(kv_cache_config: Any) -> int:
    """Bytes of one block id on one rank: all layers of the largest group.

    Groups share vLLM's memory: the same bytes belong to one group's layers or to
    another's, as the block was allocated.
    """
    return max(_group_bytes(group) for group in kv_cache_config.kv_cache_groups)


def cpu_blocks(config: TTLCacheConfig, vllm_config: Any, kv_cache_config: Any) -> int:
    """Blocks that fit in `cpu_gb`, which all ranks of this engine share.

    Raises:
        ConfigError: not even two do (one stands for "no block", as in vLLM's pool).
    """
    ranks = vllm_config.parallel_config.world_size
    size = block_bytes(kv_cache_config)
    count = int(config.cpu_gb * 1e9 / ranks) // size
    if count < 2:
        raise ConfigError(
            f"key 'cpu_gb' has value {config.cpu_gb:g}, expected: at least "
            f"{2 * size * ranks / 1e9:.3g} for this model's blocks of {size} bytes "
            f"on {ranks} rank(s)"
        )
    return count


def _group_bytes(group: Any) -> int:
    spec = group.kv_cache_spec
    specs = getattr(spec, "kv_cache_specs", None)
    if specs:  # layers of one type, but different shapes
        return sum(int(each.page_size_bytes) for each in specs.values())
    return int(spec.page_size_bytes) * len(group.layer_names)
