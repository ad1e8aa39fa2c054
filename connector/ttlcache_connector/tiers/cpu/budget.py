"""How many blocks `cpu_gb` is, and their memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import psutil
import torch

from ttlcache.config import TTLCacheConfig
from ttlcache.errors import ConfigError, TransferError

CGROUP, PROCESS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
#: Default of `cpu_gb`: a share of free memory, at most so much a rank: to take it
#: makes a start seconds longer.
_FREE_SHARE, _MOST_GB = 1 / 4, 16.0
#: A smaller default is no tier. And the size where `resolve_auto` was not asked.
MIN_GB = 1.0
#: Options of vLLM that cut a request's KV along its length or the model's depth.
MUST_BE_ONE = (
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
    for option in MUST_BE_ONE:
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


def default_gb(parallel_config: Any) -> float:
    """`cpu_gb` where none is given, of each engine that may start on this host."""
    engines: int = max(parallel_config.data_parallel_size_local, 1)
    if parallel_config.data_parallel_external_lb:  # each is a server of its own
        engines = parallel_config.data_parallel_size
    most_gb: float = _MOST_GB * parallel_config.world_size
    return min(available_bytes() / 1e9 * _FREE_SHARE / engines, most_gb)


def block_bytes(kv_cache_config: Any) -> int:
    """One block's bytes on one rank: vLLM's allocation divided by its blocks. The
    scheduler's copy of the configuration lacks the shapes of layers that differ."""
    tensors = kv_cache_config.kv_cache_tensors
    (num_bytes,) = {tensor.size for tensor in tensors if not tensor.host_resident}
    return int(num_bytes) // int(kv_cache_config.num_blocks)


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
    """What the machine has left, or a control group of this process's."""
    return min([int(psutil.virtual_memory().available), *_left_in_groups()])


def _left_in_groups() -> Iterator[int]:
    """Of each control group with a limit that this process is in; caches are free."""
    for line in _read(PROCESS).splitlines():
        _, kinds, name = line.split(":", 2)
        root = CGROUP / "memory" if kinds == "memory" else CGROUP
        if kinds not in ("", "memory"):
            continue
        for group in (PurePosixPath(name), *PurePosixPath(name).parents):
            folder = root / group.relative_to("/")
            limit = _read(folder / ("memory.limit_in_bytes" if kinds else "memory.max"))
            stat = dict(map(str.split, _read(folder / "memory.stat").splitlines()))
            if limit.strip().isdecimal():
                # By the names of version 2, and of version 1 with children.
                used = [*map(stat.get, ("anon", "shmem", "total_rss", "total_shmem"))]
                yield int(limit) - sum(int(size) for size in used if size)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # no control groups of this version, or none with this file
        return ""
