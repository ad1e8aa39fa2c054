"""In a worker: loads and stores as LMCache orders them; an exception is a miss."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from lmcache.integration.vllm.lmcache_mp_metadata import LMCacheMPRequestMetadata
from lmcache.v1.multiprocess.futures import MessagingFuture
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from ttlcache.clock import default_clock
from ttlcache.config import TTLCacheConfig
from ttlcache.errors import ConfigError
from ttlcache.metrics import MetricsBuffer
from ttlcache_connector import compat
from ttlcache_connector.lower_lmcache.connect import connect
from ttlcache_connector.lower_lmcache.transfer import ThreadedTransfer
from ttlcache_connector.movethread import MoveThread
from ttlcache_connector.tiers import TierMetadata, Transfers, WorkerTier

log = compat.logger(__name__)

#: Seconds that start-up and re-registration may take: they map GPU memory.
REGISTER_TIMEOUT_S = 60.0
#: A load that took longer is given up, and its tokens are prefilled.
LOAD_TIMEOUT_S = 4.0


class WorkerHalf(WorkerTier):
    """Drives LMCache's worker side; an exception is a miss."""

    def __init__(
        self, config: TTLCacheConfig, vllm_config: Any, kv_cache_config: Any
    ) -> None:
        self.metrics = MetricsBuffer()
        self._now_s = default_clock().now_s
        self._inner = connect(KVConnectorRole.WORKER, vllm_config, kv_cache_config)
        self._adapter = self._inner.worker_adapter
        self._thread = MoveThread("ttlcache-move")
        self._since_s: dict[str, float] = {}
        self._lmcache_register = self._adapter._send_register_kv_caches_request  # noqa: SLF001
        self._adapter._send_register_kv_caches_request = self._register  # noqa: SLF001

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        try:
            self._inner.register_kv_caches(kv_caches)
        except (ConnectionError, TimeoutError):
            raise ConfigError(
                "lower_tier 'lmcache': the LMCache server did not accept this worker's "
                "KV cache; start it with --supported-transfer-mode auto, as "
                "ttlcache serve-tiers does"
            ) from None

    def before_forward(self, metadata: TierMetadata) -> None:
        if metadata.inner is not None:
            self._inner.handle_preemptions(metadata.inner)

    def load(self, metadata: TierMetadata, forward_context: Any) -> None:
        loads = _of(metadata, "RETRIEVE")
        now_s = self._now_s()
        self._since_s.update((m.request_id, now_s) for m in loads)
        if not loads:
            return
        try:
            self._inner.bind_connector_metadata(metadata.inner)
            self._inner.start_load_kv(forward_context)
        except Exception:
            # Reported as LMCache reports what it does not even try.
            adapter = self._adapter
            for meta in loads:
                if meta.request_id not in adapter.retrieve_futures:
                    adapter.error_block_ids.update(meta.op.flat_block_ids)
                    adapter._failed_request_ids.add(meta.request_id)  # noqa: SLF001
                    adapter._dropped_retrieves.add(meta.request_id)  # noqa: SLF001
            raise

    def save(self, metadata: TierMetadata) -> None:
        stores = _of(metadata, "STORE")
        if not stores:
            return
        try:
            self._inner.bind_connector_metadata(metadata.inner)
            self._inner.wait_for_save()
        except Exception:
            # The scheduler's half holds the blocks until it hears of each of them.
            adapter = self._adapter
            for meta in stores:
                if meta.request_id not in adapter.store_futures:
                    adapter._completed_store_requests[meta.request_id] = 1  # noqa: SLF001
                    adapter._failed_store_requests.add(meta.request_id)  # noqa: SLF001
            raise

    def poll(self, finished_ids: Collection[str]) -> Transfers:
        self._give_up_late_loads()
        results = self._inner.get_transfer_results(set(finished_ids))
        transfers = Transfers(
            received=set(results.finished_recving),
            failed=set(results.failed_recving),
            invalid_blocks=self._inner.get_block_ids_with_load_errors(),
        )
        for request_id in transfers.received:
            self._since_s.pop(request_id, None)
        self._retain()
        return transfers

    def report(self) -> Any:
        return self._inner.build_connector_worker_meta()

    def shutdown(self) -> None:
        self._thread.close()
        self._inner.shutdown()

    def _register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """At start, and on LMCache's heartbeat thread after a server came back."""
        adapter = self._adapter
        if not self._is_ours(kv_caches):
            if adapter._mp_transfer_mode is None:  # noqa: SLF001
                # The other mode knows one KV cache group only.
                adapter._mp_transfer_mode = "lmcache_driven"  # noqa: SLF001
            answer_timeout_s, adapter._mq_timeout = (  # noqa: SLF001
                adapter._mq_timeout,  # noqa: SLF001
                REGISTER_TIMEOUT_S,
            )
            try:
                self._lmcache_register(kv_caches)
            finally:
                adapter._mq_timeout = answer_timeout_s  # noqa: SLF001
            return
        context = ThreadedTransfer(
            adapter.instance_id,
            adapter.req_client,
            self._thread,
            self.metrics,
            adapter._mq_timeout,  # noqa: SLF001
        )
        context.register(
            kv_caches,
            adapter.model_name,
            adapter.world_size,
            adapter.blocks_in_chunk,
            REGISTER_TIMEOUT_S,
            layout_hints=adapter._layout_hints,  # noqa: SLF001
            engine_group_infos=adapter.engine_group_infos,
        )
        adapter.kv_caches = kv_caches
        adapter.transfer_ctx = context

    def _is_ours(self, kv_caches: dict[str, torch.Tensor]) -> bool:
        """Whether our thread moves the bytes, or LMCache's server."""
        groups = len(self._adapter.engine_group_infos)
        device = next(iter(kv_caches.values())).device.type
        ours = groups <= 1 and device == "cpu"
        log.info(
            "ttlcache: KV moves between GPU and LMCache by %s (KV cache groups: %d, "
            "device: %s)",
            "this worker" if ours else "LMCache's own mover",
            groups,
            device,
        )
        return ours

    def _give_up_late_loads(self) -> None:
        now_s = self._now_s()
        futures = self._adapter.retrieve_futures
        context = self._adapter.transfer_ctx
        for request_id, since_s in list(self._since_s.items()):
            late = now_s - since_s > LOAD_TIMEOUT_S
            if not late or request_id not in futures:
                continue
            if isinstance(context, ThreadedTransfer):
                future, _ = futures[request_id]
                context.retain(f for f in self._wanted() if f is not future)
                if not future.query():
                    future.set_result(False)

    def _retain(self) -> None:
        """LMCache's adapter forgets transfers when its server is gone: so do we."""
        context = self._adapter.transfer_ctx
        if isinstance(context, ThreadedTransfer):
            context.retain(self._wanted())

    def _wanted(self) -> list[MessagingFuture[bool]]:
        adapter = self._adapter
        loads = (future for future, _ in adapter.retrieve_futures.values())
        return [*adapter.store_futures.values(), *loads]


def _of(metadata: TierMetadata, direction: str) -> list[LMCacheMPRequestMetadata]:
    inner = metadata.inner
    requests = inner.requests if inner is not None else ()
    return [m for m in requests if m.direction == direction]
