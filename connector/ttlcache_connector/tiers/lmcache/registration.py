"""Makes vLLM's KV tensors known to an LMCache server, and decides who moves bytes.

Our transfer path in this worker moves them where there is one KV cache group; it stores
blocks in vLLM's order of bytes, under a name of its own where that is not LMCache's
order. Elsewhere, and where `lmcache.mp.mp_transfer_mode` says so, LMCache's server maps
the worker's memory. A server that stands still and goes on later may then write into
blocks that are another request's by that time; our path gives such copies up.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import torch
from lmcache.integration.vllm.vllm_multi_process_adapter import get_lmcache_chunk_size

from ttlcache.errors import ConfigError, TransferError
from ttlcache.telemetry.metrics import MetricsBuffer
from ttlcache_connector.copy.kv_layouts import namespace
from ttlcache_connector.log import logger
from ttlcache_connector.tiers.lmcache.client import is_by_worker
from ttlcache_connector.tiers.lmcache.copier import ChunkCopier
from ttlcache_connector.tiers.lmcache.copy_thread import CopyThreads
from ttlcache_connector.tiers.lmcache.worker_transfer import ThreadedTransfer
from ttlcache_lmcache import internals

log = logger(__name__)

#: Seconds that start-up and re-registration may take: they map GPU memory.
REGISTER_TIMEOUT_S = 60.0


def own_name(vllm_config: Any, kv_cache_config: Any) -> str:
    """What our transfer path adds to the name under which LMCache keeps blocks.

    Scheduler and workers compute it each for themselves. Empty where our path has
    LMCache's order of bytes, and where it moves none.
    """
    is_ours = is_by_worker(vllm_config, kv_cache_config)
    return namespace(kv_cache_config) if is_ours else ""


class Registration:
    """Replaces the registration of LMCache's worker adapter."""

    def __init__(
        self,
        adapter: Any,
        threads: CopyThreads,
        metrics: MetricsBuffer,
        vllm_config: Any,
        kv_cache_config: Any,
    ) -> None:
        self._adapter = adapter
        self._threads = threads
        self._metrics = metrics
        self._config = kv_cache_config
        self._may_sleep = vllm_config.model_config.enable_sleep_mode
        self._is_by_worker = is_by_worker(vllm_config, kv_cache_config)
        adapter.model_name += own_name(vllm_config, kv_cache_config)
        self._copier: ChunkCopier | None = None
        self._lock = threading.Lock()  # of what is mapped
        self._number = 0  # of registrations
        self._was_up = False  # after the last step
        self._register_at_server = internals.replace_registration(
            adapter, self._register
        )

    def close(self) -> None:
        """After the last move."""
        if self._copier is not None:
            self._copier.close()

    def on_health(self, *, is_up: bool) -> None:
        """Told after each step whether the server answers.

        If it does not, its memory is unmapped. A dead server's memory is free only
        then, and it may need that room to start again.
        """
        if is_up or not self._is_by_worker:
            self._was_up = is_up
        elif self._was_up:
            self._was_up = False
            # Not here: to unpin hundreds of GB takes seconds.
            gone = partial(self._unmap_if_gone, self._number)
            threading.Thread(target=gone, name="ttlcache-unmap", daemon=True).start()

    def _unmap_if_gone(self, number: int) -> None:
        with self._lock:
            if number != self._number:
                return  # it is back already
            try:
                self._unmap()
            except Exception:
                log.exception("ttlcache: memory of LMCache's server stays mapped")

    def _register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """At start, and on LMCache's heartbeat thread after a server came back."""
        with self._lock:
            self._number += 1
            self._register_anew(kv_caches)
        internals.ping_from_now_on(self._adapter)

    def _register_anew(self, kv_caches: dict[str, torch.Tensor]) -> None:
        ours = self._adapter.lmcache_tokens_per_chunk
        theirs = get_lmcache_chunk_size(self._adapter.req_client, REGISTER_TIMEOUT_S)
        if theirs != ours:
            raise TransferError(f"LMCache's chunks: {theirs} tokens now, not {ours}")
        if not self._is_by_worker:
            self._by_server(kv_caches)
            return
        device = next(iter(kv_caches.values())).device
        if device.type == "cuda":
            torch.cuda.set_device(device)  # LMCache's heartbeat thread is on GPU 0
        self._unmap()
        if self._copier is None:
            self._copier = self._make_copier(kv_caches)
        self._by_worker(kv_caches, self._copier)

    def _unmap(self) -> None:
        # Slots of an old server must not be filled and committed to a new one.
        self._threads.cancel_all_but(())
        if self._copier is not None:
            self._copier.detach()
        if self._adapter.transfer_ctx is not None:
            self._adapter.transfer_ctx.close()

    def _make_copier(self, kv_caches: dict[str, torch.Tensor]) -> ChunkCopier:
        """
        Raises:
            TransferError: our path does not serve these tensors.
        """
        adapter = self._adapter
        if len(adapter.engine_group_infos) > 1:
            raise TransferError(f"LMCache has {len(adapter.engine_group_infos)} groups")
        hints = internals.layout_hints(adapter)
        copier = ChunkCopier.of(kv_caches, self._config, hints)
        log.info(
            "ttlcache: KV moves to and from LMCache by ttlcache's %s engine",
            copier.name,
        )
        return copier

    def _by_worker(
        self, kv_caches: dict[str, torch.Tensor], copier: ChunkCopier
    ) -> None:
        adapter = self._adapter
        context = ThreadedTransfer(
            adapter.instance_id,
            adapter.req_client,
            self._threads,
            self._metrics,
            internals.answer_timeout_s(adapter),
            copier,
            partial(internals.register_anew, adapter),
        )
        try:
            context.register(
                kv_caches,
                adapter.model_name,
                adapter.world_size,
                adapter.blocks_in_chunk,
                REGISTER_TIMEOUT_S,
                layout_hints=internals.layout_hints(adapter),
                engine_group_infos=adapter.engine_group_infos,
            )
        except TransferError:
            context.close()
            raise
        adapter.kv_caches = kv_caches
        adapter.transfer_ctx = context

    def _by_server(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if self._may_sleep:
            # It would go on with memory that vLLM gives back in a sleep.
            raise ConfigError(
                "lower_tier 'lmcache': LMCache's server maps this model's KV cache "
                "(it has several groups), which does not go with --enable-sleep-mode"
            )
        internals.register_at_server(
            self._adapter, self._register_at_server, kv_caches, REGISTER_TIMEOUT_S
        )
