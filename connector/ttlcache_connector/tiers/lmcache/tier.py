"""LMCache as one of the lower tiers; it is imported only where it is asked for."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from vllm.v1.kv_cache_interface import FullAttentionSpec

from ttlcache.config import TTLCacheConfig
from ttlcache_connector.engine import requirements
from ttlcache_connector.log import logger
from ttlcache_connector.tiers.base import SchedulerTier, TierFactory, WorkerTier

log = logger(__name__)


class LMCache(TierFactory):
    """`lower_tier: lmcache`."""

    def check(self, config: TTLCacheConfig) -> None:
        requirements.check_lmcache_tier(allow_untested=config.allow_untested_vllm)

    def may_sleep(self, extra_config: Mapping[str, Any]) -> bool:
        """Not where LMCache's server is to map the workers' KV cache.

        It would go on with that memory after a sleep, in which vLLM gives it back.
        Where that turns out later, the worker refuses.
        """
        mode = extra_config.get("lmcache.mp.mp_transfer_mode")
        if mode is None:
            mode = os.environ.get("LMCACHE_MP_TRANSFER_MODE")
        by_server = str(mode).lower() == "lmcache_driven"
        return not by_server and not extra_config.get("lmcache.mp.use_vmm_api")

    def scheduler_half(
        self, config: TTLCacheConfig, vllm_config: Any, kv_cache_config: Any
    ) -> SchedulerTier:
        if kind := _unstorable_kind(kv_cache_config):
            log.warning(
                "ttlcache: no lower tier for this model, what pins lose is prefilled: "
                "LMCache's lazy offload stores nothing of layers of the kind %s; "
                "vLLM's --disable-hybrid-kv-cache-manager makes window layers full "
                "ones",
                kind,
            )
            return SchedulerTier()
        from ttlcache_connector.tiers.lmcache.scheduler import LMCacheSchedulerTier

        return LMCacheSchedulerTier(config, vllm_config, kv_cache_config)

    def worker_half(
        self, config: TTLCacheConfig, vllm_config: Any, kv_cache_config: Any
    ) -> WorkerTier:
        if _unstorable_kind(kv_cache_config):
            return WorkerTier()
        from ttlcache_connector.tiers.lmcache.worker import LMCacheWorkerTier

        return LMCacheWorkerTier(vllm_config, kv_cache_config)


def _unstorable_kind(kv_cache_config: Any) -> str:
    """A kind of layers that LMCache's lazy offload cannot hold; empty: there is none.

    It knows a block by its hash and drops every request that has a block without one
    (`LazyOffloadManager.add_store_candidate`, `_drain`). vLLM gives none to blocks that
    the window has passed, nor to states in between.
    """
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        specs = getattr(spec, "kv_cache_specs", None) or {"": spec}
        for each in specs.values():
            if not isinstance(each, FullAttentionSpec):
                return type(each).__name__.removesuffix("Spec")
    return ""
