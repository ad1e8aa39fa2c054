"""The worker's half of the lower tier, fail-open: a broken tier is a miss."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from ttlcache.clock import default_clock
from ttlcache_connector.faults import Faults, guarded
from ttlcache_connector.role.metrics import TTLConnectorStats
from ttlcache_connector.tiers.base import TierMetadata, Transfers, WorkerTier

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorWorkerMetadata,
    )


class WorkerRole:
    """Guards every call of a step; those at start go to `tier`, and may raise."""

    def __init__(self, tier: WorkerTier, *, zeroes_blocks: bool) -> None:
        """
        Args:
            zeroes_blocks: vLLM zeroes new blocks, after `before_forward`.
        """
        self.tier = tier
        self._zeroes_blocks = zeroes_blocks
        # Of which step the copies have begun already, before its forward pass.
        self._loaded: TierMetadata | None = None
        self._saved: TierMetadata | None = None
        self.faults = Faults(self._count, lambda: None, default_clock().now_s)
        self._abandoned: set[str] = set()

    @guarded()
    def before_forward(self, metadata: Any, *, is_alone: bool) -> None:
        """Start what needs not wait for this step's forward pass.

        vLLM asks for asynchronous loads only after it. Begun before it they run beside
        it, and end a step earlier; to submit them takes next to no CPU time.

        Args:
            is_alone: no other connector moves this worker's blocks. Another one may
                still have to read what is overwritten: it is told after us.
        """
        if not isinstance(metadata, TierMetadata):
            return
        loads = is_alone and not self._zeroes_blocks
        self._loaded = metadata if loads else None
        self._saved = metadata if metadata.stores_before_forward else None
        try:
            if loads:
                self.tier.load(metadata)
        finally:
            if metadata.stores_before_forward:
                self.tier.save(metadata)

    @guarded()
    def load(self, metadata: Any) -> None:
        self._abandoned |= metadata.abandoned
        if self._loaded is not metadata:
            self.tier.load(metadata)

    @guarded()
    def save(self, metadata: Any) -> None:
        if self._saved is not metadata:
            self.tier.save(metadata)

    def poll(self, finished_ids: Collection[str]) -> Transfers:
        """What ended since the last call, abandoned loads included."""
        transfers = self._poll(finished_ids) or Transfers()
        transfers.received |= self._abandoned
        transfers.failed |= self._abandoned
        self._abandoned = set()
        return transfers

    @guarded()
    def report(self) -> KVConnectorWorkerMetadata | None:
        return self.tier.report()

    @guarded()
    def take_stats(self) -> TTLConnectorStats | None:
        metrics = self.tier.metrics
        if metrics.is_empty():
            return None
        return TTLConnectorStats(data=metrics.drain() | {"gauges": {}})

    @guarded()
    def shutdown(self) -> None:
        self.tier.shutdown()

    @guarded()
    def _poll(self, finished_ids: Collection[str]) -> Transfers:
        return self.tier.poll(finished_ids)

    def _count(self, hook: str) -> None:
        self.tier.metrics.count("hook_errors", f"worker_{hook.strip('_')}")
