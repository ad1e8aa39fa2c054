"""In a worker: loads and stores as LMCache orders them; an exception is a miss."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from lmcache.integration.vllm.lmcache_mp_metadata import LMCacheMPRequestMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)

from ttlcache.errors import ConfigError, TransferError
from ttlcache_connector.log import logger
from ttlcache_connector.tiers.base import TierMetadata, Transfers, WorkerTier
from ttlcache_connector.tiers.lmcache.client import PREFIX, connect
from ttlcache_connector.tiers.lmcache.copy_thread import CopyThreads
from ttlcache_connector.tiers.lmcache.registration import Registration
from ttlcache_connector.tiers.lmcache.reports import WorkerReport
from ttlcache_connector.tiers.lmcache.worker_transfer import ThreadedTransfer
from ttlcache_lmcache import internals

log = logger(__name__)

#: Loads are given up, and prefilled, where none gets on for so long, and one that has
#: taken so long with its wait for others.
LOAD_TIMEOUT_S, MAX_LOAD_S = 4.0, 30.0


class LMCacheWorkerTier(WorkerTier):
    """Drives LMCache's worker side; an exception is a miss."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any) -> None:
        super().__init__()
        self._inner = connect(KVConnectorRole.WORKER, vllm_config, kv_cache_config)
        self._adapter = self._inner.worker_adapter
        self._threads = CopyThreads()
        self._registration = Registration(
            self._adapter, self._threads, self.metrics, vllm_config, kv_cache_config
        )
        self._load_s: dict[str, float] = {}  # of loads that are not reported yet

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        try:
            self._inner.register_kv_caches(kv_caches)
        except (ConnectionError, TimeoutError):
            log.exception("ttlcache: this worker could not register at LMCache")
            raise ConfigError(
                "lower_tier 'lmcache': the LMCache server did not accept this worker's "
                "KV cache; start it with --supported-transfer-mode auto, as "
                "ttlcache serve-tiers does"
            ) from None
        except ConfigError:
            raise  # it says what is wrong
        except TransferError as error:
            raise ConfigError(
                f"lower_tier 'lmcache': ttlcache cannot copy this KV cache ({error}); "
                f'set "{PREFIX}mp_transfer_mode" to "lmcache_driven" and LMCache\'s '
                "server copies it"
            ) from error
        except (RuntimeError, ValueError) as error:
            # Anything may be behind it, also a device that failed.
            log.exception("ttlcache: this worker could not register at LMCache")
            raise ConfigError(
                f"lower_tier 'lmcache': LMCache refuses this model: {error}"
            ) from error

    def load(self, metadata: TierMetadata) -> None:
        loads = _of(metadata, "RETRIEVE")
        if not loads:
            return
        try:
            self._inner.bind_connector_metadata(metadata.inner)
            self._inner.start_load_kv(None)  # it does not look at it
        except Exception:
            adapter = self._adapter
            for meta in loads:
                if meta.request_id not in adapter.retrieve_futures:
                    internals.fail_load(adapter, meta.request_id)
            raise

    def save(self, metadata: TierMetadata) -> None:
        stores = _of(metadata, "STORE")
        if not stores:
            return
        try:
            self._inner.bind_connector_metadata(metadata.inner)
            self._inner.wait_for_save()
        except Exception:
            # The scheduler's half holds the blocks until each of them is reported.
            adapter = self._adapter
            for meta in stores:
                if meta.request_id not in adapter.store_futures:
                    internals.fail_store(adapter, meta.request_id)
            raise

    def poll(self, finished_ids: Collection[str]) -> Transfers:
        self._give_up_late_loads()
        results = self._inner.get_transfer_results(set(finished_ids))
        transfers = Transfers(
            received=set(results.finished_recving),
            failed=results.failed_recving | self._adapter.get_failed_request_ids(),
        )
        context = self._adapter.transfer_ctx
        times = context.load_s if isinstance(context, ThreadedTransfer) else {}
        for request_id in transfers.received:
            seconds = times.pop(request_id, None)
            if seconds is not None and request_id not in transfers.failed:
                self._load_s[request_id] = seconds
        for request_id in list(times):  # the thread may add some
            if request_id not in self._adapter.retrieve_futures:
                times.pop(request_id)
        self._cancel_dropped()
        self._registration.on_health(is_up=self._adapter.is_healthy)
        return transfers

    def report(self) -> KVConnectorWorkerMetadata | None:
        stores: KVConnectorWorkerMetadata | None
        stores = self._inner.build_connector_worker_meta()
        if not self._load_s:
            return stores
        load_s, self._load_s = self._load_s, {}
        return WorkerReport.of(stores, load_s)

    def shutdown(self) -> None:
        self._threads.close()
        self._inner.shutdown()
        self._registration.close()

    def _give_up_late_loads(self) -> None:
        context = self._adapter.transfer_ctx
        if not isinstance(context, ThreadedTransfer):
            return
        stands = self._threads.loads.stands_for_s() > LOAD_TIMEOUT_S
        for future, _ in list(self._adapter.retrieve_futures.values()):
            if stands or context.waited_s(future) > MAX_LOAD_S:
                context.give_up(future)
                if not future.query():
                    future.set_result(False)

    def _cancel_dropped(self) -> None:
        """LMCache's adapter forgets transfers when its server is gone: so do we."""
        adapter = self._adapter
        if isinstance(adapter.transfer_ctx, ThreadedTransfer):
            loads = (future for future, _ in adapter.retrieve_futures.values())
            adapter.transfer_ctx.cancel_all_but(
                [*adapter.store_futures.values(), *loads]
            )


def _of(metadata: TierMetadata, direction: str) -> list[LMCacheMPRequestMetadata]:
    inner = metadata.inner
    requests = inner.requests if inner is not None else ()
    return [m for m in requests if m.direction == direction]
