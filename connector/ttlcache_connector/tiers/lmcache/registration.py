"""Makes vLLM's KV tensors known to an LMCache server, and says who moves their bytes.

Two movers: our transfer path in this worker, and LMCache's server, which maps the
worker's memory. The first stores blocks in vLLM's order of bytes, under a name of its
own where that is not LMCache's order.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from lmcache.v1.multiprocess.transfer_context.worker_transfer import (
    MPTransferMode,
    _resolve_mode,
)

from ttlcache.errors import ConfigError, TransferError
from ttlcache.telemetry.metrics import MetricsBuffer
from ttlcache_connector.copy.copy_thread import CopyThreads
from ttlcache_connector.copy.kv_layouts import namespace
from ttlcache_connector.log import logger
from ttlcache_connector.tiers.lmcache.client import PREFIX
from ttlcache_connector.tiers.lmcache.copier import ChunkCopier
from ttlcache_connector.tiers.lmcache.worker_transfer import ThreadedTransfer
from ttlcache_lmcache import internals

log = logger(__name__)

#: Seconds that start-up and re-registration may take: they map GPU memory.
REGISTER_TIMEOUT_S = 60.0


def own_name(vllm_config: Any, kv_cache_config: Any) -> str:
    """What our transfer path adds to the name under which LMCache keeps blocks.

    Scheduler and workers compute it each for themselves. Empty where our path has
    LMCache's order of bytes, and where it is known beforehand not to serve.
    """
    groups = kv_cache_config.kv_cache_groups
    is_one = sum(getattr(group, "enable_kv_transfer", True) for group in groups) == 1
    extra = vllm_config.kv_transfer_config.kv_connector_extra_config or {}
    by_server = _is_by_server(extra.get(PREFIX + "mp_transfer_mode"))
    return namespace(kv_cache_config) if is_one and not by_server else ""


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
        self._plain_name = adapter.model_name
        adapter.model_name += own_name(vllm_config, kv_cache_config)
        self._copier: ChunkCopier | None = None
        self._is_decided = False
        self._register_at_server = internals.replace_registration(
            adapter, self._register
        )
        self.changed_name: str | None = None
        """The name that holds instead of the one computed, for the scheduler's half."""

    def close(self) -> None:
        """After the last move."""
        if self._copier is not None:
            self._copier.close()

    def _register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """At start, and on LMCache's heartbeat thread after a server came back."""
        device = next(iter(kv_caches.values())).device
        if device.type == "cuda":
            torch.cuda.set_device(device)  # LMCache's heartbeat thread is on GPU 0
        # Slots of an old server must not be filled and committed to a new one.
        self._threads.retain(())
        old = self._adapter.transfer_ctx
        if isinstance(old, ThreadedTransfer):
            if self._copier is not None:
                self._copier.detach()
            old.close()  # or a dead server's memory would stay mapped
        is_first = not self._is_decided
        if is_first:
            self._copier = self._choose(kv_caches)
            self._is_decided = True
        if self._copier is not None:
            try:
                self._by_worker(kv_caches, self._copier)
            except TransferError as error:
                if not is_first:
                    raise
                self._copier.close()
                self._copier = None
                self._leave_to_server(str(error))
            else:
                return
        self._by_server(kv_caches)

    def _choose(self, kv_caches: dict[str, torch.Tensor]) -> ChunkCopier | None:
        """Our path if it serves; None: LMCache's server moves the bytes."""
        adapter = self._adapter
        if len(adapter.engine_group_infos) > 1:
            reason = f"{len(adapter.engine_group_infos)} KV cache groups"
        elif _is_by_server(internals.transfer_mode(adapter)):
            reason = "mp_transfer_mode is lmcache_driven"
        else:
            try:
                hints = internals.layout_hints(adapter)
                copier = ChunkCopier(kv_caches, self._config, hints)
            except TransferError as error:
                reason = str(error)
            except Exception as error:
                log.warning("ttlcache: no transfer path of ours", exc_info=True)
                reason = f"{type(error).__name__}: {error}"
            else:
                log.info(
                    "ttlcache: KV moves to and from LMCache by ttlcache's %s engine",
                    copier.name,
                )
                return copier
        self._leave_to_server(reason)
        return None

    def _leave_to_server(self, reason: str) -> None:
        adapter = self._adapter
        if adapter.model_name != self._plain_name:
            adapter.model_name = self.changed_name = self._plain_name
        log.info(
            "ttlcache: KV moves to and from LMCache by LMCache's server (%s)", reason
        )

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
            self._leave(context)
            raise
        adapter.kv_caches = kv_caches
        adapter.transfer_ctx = context

    def _leave(self, context: ThreadedTransfer) -> None:
        """The server knows this worker by now, but not by this mover."""
        left = context.unregister()
        if left is not None:
            with contextlib.suppress(TimeoutError):
                left.result(timeout=REGISTER_TIMEOUT_S)
        context.close()

    def _by_server(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if self._may_sleep:
            # It would go on with memory that vLLM gives back in a sleep.
            raise ConfigError(
                "lower_tier 'lmcache': LMCache's server maps this model's KV cache "
                "(the log says why), which does not go with --enable-sleep-mode"
            )
        internals.register_at_server(
            self._adapter, self._register_at_server, kv_caches, REGISTER_TIMEOUT_S
        )


def _is_by_server(mode: Any) -> bool:
    """Whether the configuration (or LMCache's environment variable) says so."""
    return bool(_resolve_mode(mode) is MPTransferMode.LMCACHE_DRIVEN)
