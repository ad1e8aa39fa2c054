"""vLLM's own options beside TTLConnector: refused, put right, or said at start.

docs/vllm-options.md has a row for each of them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

from ttlcache.config import TTLCacheConfig
from ttlcache.errors import ConfigError
from ttlcache_connector.engine import requirements, vllm_internals
from ttlcache_connector.log import logger

log = logger(__name__)
#: Where our scheduler classes are.
_OURS = "ttlcache_connector.scheduler"


def check_arguments(engine_args: Any, connectors: int) -> None:
    """Called before vLLM builds its configuration, in which ours may be gone.

    connectors: how many TTLConnectors the arguments name.

    Raises:
        ConfigError: vLLM would put its own offloading connector in our place, or there
            is more than one of ours.
    """
    if connectors > 1:
        raise ConfigError(
            f"--kv-transfer-config names {connectors} TTLConnectors, expected: one"
        )
    size_gib = engine_args.kv_offloading_size
    if size_gib is not None:
        raise ConfigError(
            f"--kv-offloading-size {size_gib:g} makes vLLM drop the TTLConnector that "
            "--kv-transfer-config names: remove --kv-offloading-size, and for CPU "
            'memory below the pins set "lower_tier": "cpu" in TTLConnector\'s '
            "kv_connector_extra_config (docs/tiers.md)"
        )


def check(vllm_config: Any, config: TTLCacheConfig) -> None:
    """Refuse options under which TTLConnector cannot work.

    Raises:
        ConfigError: which option, and what was expected.
    """
    requirements.check_engine(vllm_config)
    parallel = vllm_config.parallel_config
    backend = parallel.distributed_executor_backend
    ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
    if backend == "external_launcher" and ranks > 1:
        raise ConfigError(
            f"--distributed-executor-backend {backend} with {ranks} ranks, expected: "
            "1 (each schedules for itself, and TTLs end by a clock)"
        )
    by_priority = vllm_config.scheduler_config.policy == "priority"
    if by_priority and config.admission not in ("auto", "none"):
        raise ConfigError(
            f"key 'admission' has value {config.admission!r}, expected: 'auto' or "
            "'none' with --scheduling-policy priority, which has its own order"
        )
    role = vllm_config.kv_transfer_config.kv_role
    if config.has_lower_tier and role == "kv_producer":
        raise ConfigError(
            "kv_role has value 'kv_producer', expected: 'kv_both' with lower_tier "
            f"{config.lower_tier!r} (vLLM lets only a consumer load)"
        )


def put_right(vllm_config: Any, engine_args: Any) -> None:
    """Undo what vLLM changes for any KV connector although ours needs it not.

    It takes embeddings from clients ("kv_both" may be the consumer of a prefill node),
    which it says to allow for trusted users only.
    """
    model_config = vllm_config.model_config
    mm_config = getattr(model_config, "multimodal_config", None)
    is_alone = vllm_config.kv_transfer_config.kv_connector == "TTLConnector"
    if mm_config is None or not is_alone or vllm_config.ec_transfer_config is not None:
        return
    mm_config.allow_missing_mm_embeddings = False
    if mm_config.enable_mm_embeds and not engine_args.enable_mm_embeds:
        mm_config.enable_mm_embeds = False
        log.info(
            "ttlcache: pre-computed embeddings are not accepted from clients, as "
            "without a KV connector; --enable-mm-embeds accepts them"
        )


def log_missing(vllm_config: Any, engine_args: Any, config: TTLCacheConfig) -> None:
    """Say at start what does not work, once for all API servers of an engine."""
    if not vllm_internals.is_first_api_server(vllm_config):
        return
    for sentence in missing(vllm_config, engine_args, config):
        log.warning("ttlcache: %s", sentence)


def missing(
    vllm_config: Any, engine_args: Any, config: TTLCacheConfig
) -> Iterator[str]:
    """A sentence for each option under which a part of ttlcache does not work."""
    yield from _missing_of_scheduler(vllm_config.scheduler_config)
    yield from _missing_of_vllm(vllm_config)
    transfer = vllm_config.kv_transfer_config
    if transfer.kv_connector == "TTLConnector" and transfer.kv_role != "kv_both":
        yield (
            f"kv_role {transfer.kv_role!r} does what 'kv_both' does: TTLConnector "
            "hands no KV to other engines; Nixl or Mooncake beside it in a "
            "MultiConnector do"
        )
    if vllm_config.model_config.runner_type == "pooling":
        yield "this model generates nothing: no request has a next turn, none is pinned"
    if engine_args.disable_log_stats:
        yield "--disable-log-stats: /metrics has no ttlcache_* metrics"
    frontend = _foreign_frontend()
    if frontend is not None:
        yield (
            f"{frontend} loads no middleware: programs are recognised by hints and by "
            "the growing prompt, not by agents' own headers, fields and URLs; there "
            "are no /ttlcache/… routes and no ttlcache_* metrics"
        )
    if not config.has_lower_tier:
        return
    if config.lower_tier == "lmcache" and vllm_config.lora_config is not None:
        yield "--enable-lora: KV of adapters never goes to LMCache"
    if config.lower_tier == "lmcache" and vllm_config.model_config.enable_prompt_embeds:
        yield "--enable-prompt-embeds: their KV never goes to LMCache"
    events = vllm_config.kv_events_config
    if events is not None and events.enable_kv_cache_events:
        yield "--kv-events-config: events tell of GPU memory, not of the lower tier"


def _missing_of_vllm(vllm_config: Any) -> Iterator[str]:
    """What vLLM itself leaves out wherever there is a KV connector."""
    from vllm.platforms import current_platform

    if current_platform.is_rocm():
        yield "vLLM does not choose the attention backend ROCM_ATTN beside a connector"
    drafts = vllm_config.speculative_config
    hashes_ahead = hasattr(vllm_config, "num_hash_lookahead_tokens")  # since 0.33
    if hashes_ahead and drafts is not None and drafts.use_eagle():
        yield (
            f"speculative method {drafts.method}: vLLM drops the last block of a hit "
            "beside a connector: each turn computes one block more"
        )


def _missing_of_scheduler(scheduler_config: Any) -> Iterator[str]:
    if str(scheduler_config.scheduler_cls).startswith(_OURS):
        return
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    cls = scheduler_config.get_scheduler_cls()
    if not any(base.__module__ == _OURS for base in cls.__mro__):
        yield (
            f"scheduler class {cls.__name__} is not derived from ttlcache's: turns are "
            "pinned and pins give way under pressure, but programs are not ordered"
        )
    if scheduler_config.async_scheduling and not issubclass(cls, AsyncScheduler):
        yield (
            f"scheduler class {cls.__name__} does not derive from AsyncScheduler: "
            "steps are not scheduled ahead although async scheduling is on"
        )


def _foreign_frontend() -> str | None:
    """This process's API server, if it is another one than vLLM's Python one."""
    if os.environ.get("VLLM_USE_RUST_FRONTEND", "0") != "0" and "serve" in sys.argv:
        return "the Rust API server (VLLM_USE_RUST_FRONTEND)"
    if "--grpc" in sys.argv or "".join(sys.argv[:1]).endswith("grpc_server.py"):
        return "the gRPC server"
    return None
