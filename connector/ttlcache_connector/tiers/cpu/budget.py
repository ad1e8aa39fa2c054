"""How many blocks `cpu_gb` is, and their memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import torch

from ttlcache.config import TTLCacheConfig
from ttlcache.errors import ConfigError, TransferError

CGROUP = Path("/sys/fs/cgroup")
#: `cpu_gb` where none is given: a share of what is free, and on a rank no more, which
#: is seconds of each start.
_FREE_SHARE, _MOST_GB = 1 / 4, 16.0
#: And where nothing counted what is free (`tier.defaults_in_force`).
MIN_GB = 1.0
#: Options of vLLM that cut a request's KV along its length or the model's depth.
UNCUT = (
    "pipeline_parallel_size",
    "decode_context_parallel_size",
    "prefill_context_parallel_size",
)


def count_blocks(config: TTLCacheConfig, vllm_config: Any, kv_cache_config: Any) -> int:
    """Blocks that fit in `cpu_gb`, which all ranks of this engine share.

    Both halves count them, each for itself.

    Raises:
        ConfigError: not even two do (one stands for "no block", as in vLLM's pool), or
            ranks differ in the size of a block, or in the tokens of one.
    """
    parallel = vllm_config.parallel_config
    for option in UNCUT:
        if getattr(parallel, option, 1) > 1:
            raise ConfigError(
                f"{option} has value {getattr(parallel, option)}, expected: 1 with "
                "\"lower_tier\": 'cpu'"
            )
    size = block_bytes(kv_cache_config)
    ranks = parallel.world_size
    cpu_gb = config.cpu_gb or MIN_GB
    count = int(cpu_gb * 1e9 / ranks) // size
    if count < 2:
        raise ConfigError(
            f"key 'cpu_gb' has value {cpu_gb:g}, expected: at least "
            f"{2 * size * ranks / 1e9:.3g} for this model's blocks of "
            f"{size} bytes on {ranks} rank(s)"
        )
    return count


def free_gb(parallel_config: Any) -> float:
    """Of host memory, for each engine that starts on this host."""
    engines: int = max(parallel_config.data_parallel_size_local, 1)
    return available_bytes() / 1e9 / engines


def default_gb(parallel_config: Any) -> float:
    """`cpu_gb` where none is given."""
    most_gb: float = _MOST_GB * parallel_config.world_size
    return min(free_gb(parallel_config) * _FREE_SHARE, most_gb)


def block_bytes(kv_cache_config: Any) -> int:
    """Bytes of one block on one rank: all layers of the largest cache group.

    Groups share vLLM's memory: the same bytes belong to one group's layers or to
    another's, as the block was allocated.
    """
    return max(_group_bytes(group) for group in kv_cache_config.kv_cache_groups)


def _group_bytes(group: Any) -> int:
    spec = group.kv_cache_spec
    specs = getattr(spec, "kv_cache_specs", None)
    if specs:  # layers of one type, but different shapes
        return sum(int(each.page_size_bytes) for each in specs.values())
    return int(spec.page_size_bytes) * len(group.layer_names)


def allocate(num_bytes: int) -> torch.Tensor:
    """Host memory that is resident from now on: later it cannot run short.

    Raises:
        TransferError: there is not so much.
    """
    available = available_bytes()
    if num_bytes > available:
        raise TransferError(
            f"{num_bytes / 1e9:.3g} GB of host memory wanted on this rank, "
            f"{available / 1e9:.3g} GB available"
        )
    return torch.empty(num_bytes, dtype=torch.uint8).zero_()


def available_bytes() -> int:
    """What the machine has left, or this container, whose caches can be dropped."""
    machine = int(psutil.virtual_memory().available)
    try:
        limit = int((CGROUP / "memory.max").read_text())
        lines = (CGROUP / "memory.stat").read_text().splitlines()
    except (OSError, ValueError):  # no control groups (v2), or no limit: "max"
        return machine
    used = {name: int(size) for name, size in map(str.split, lines)}
    return min(machine, limit - used["anon"] - used["shmem"])
