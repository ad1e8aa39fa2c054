"""In a worker: host memory, and the engines that copy blocks to it and back."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import numpy as np
import torch

from ttlcache.errors import TransferError
from ttlcache.telemetry.metrics import MetricsBuffer
from ttlcache.transfer import (
    Direction,
    Failure,
    ReferenceEngine,
    TransferEngine,
    plan_copies,
)
from ttlcache.transfer.base import Ticket
from ttlcache_connector.copy.engines import CopyEngines, make_engines
from ttlcache_connector.copy.kv_layouts import whole_blocks
from ttlcache_connector.log import logger
from ttlcache_connector.tiers.base import TierMetadata, Transfers, WorkerTier
from ttlcache_connector.tiers.cpu.budget import allocate, block_bytes
from ttlcache_connector.tiers.cpu.messages import BlockCopy, CopyOrders, CopyReport

log = logger(__name__)


class CopyQueue:
    """Copies of one direction."""

    def __init__(
        self, direction: Direction, engine: TransferEngine, metrics: MetricsBuffer
    ) -> None:
        self._direction, self.engine, self._metrics = direction, engine, metrics
        self._under_way: dict[Ticket, Any] = {}
        self._failed: list[Any] = []
        self._has_raised = False
        #: No copy will succeed any more.
        self.is_broken = False

    @property
    def is_copying(self) -> bool:
        return bool(self._under_way)

    def submit(
        self, key: Any, copy: BlockCopy, layout: Any, host: torch.Tensor, event: Any
    ) -> None:
        """
        Args:
            key: the store's number, or the load's request id.
            host: bytes, one row a block.
            event: CUDA event that the copy waits for, or None.
        """
        try:
            rows = host.data_ptr() + np.asarray(copy.cpu_blocks) * host.stride(0)
            owners = (host, event)
            plan = plan_copies(
                self._direction, layout, copy.gpu_blocks, rows, 1, owners=owners
            )
            after = 0 if event is None else event.cuda_event
            self._under_way[self.engine.submit(plan, after)] = key
        except Exception:
            log.warning("ttlcache: a copy could not begin", exc_info=True)
            self.fail([key])

    def fail(self, keys: Iterable[Any]) -> None:
        """`poll` reports them as failed."""
        self._failed.extend(keys)

    def poll(self) -> list[tuple[Any, float | None]]:
        """Keys of copies that ended, with their seconds; None for one that failed."""
        ended: list[tuple[Any, float | None]]
        ended = [(key, None) for key in self._failed]
        self._failed, outcomes = [], []
        try:
            outcomes = self.engine.poll()
        except Exception:
            # Its copies may go on, as those of one that hangs.
            self._metrics.count("hook_errors", "worker_poll")
            if not self._has_raised:
                name = self.engine.name
                log.warning("ttlcache: the %s engine raised", name, exc_info=True)
            self._has_raised = True
        for outcome in outcomes:
            key = self._under_way.pop(outcome.ticket)
            if outcome.failure is not None:
                why = f"{outcome.failure.value} {outcome.detail}"
                what = self._direction.value
                log.warning("ttlcache: a %s of the CPU tier failed: %s", what, why)
                self.is_broken |= outcome.failure is Failure.BROKEN
            else:
                name = "demoted" if self._direction is Direction.STORE else "promoted"
                self._metrics.count("tier_bytes", name, outcome.num_bytes)
            ended.append((key, outcome.seconds if outcome.ok else None))
        return ended


class CPUWorkerTier(WorkerTier):
    """Host memory of one rank."""

    def __init__(self, kv_cache_config: Any, num_blocks: int) -> None:
        """
        Args:
            num_blocks: of host memory.
        """
        super().__init__()
        self._config, self._num_blocks = kv_cache_config, num_blocks
        self._loading: set[str] = set()  # requests that vLLM has not heard of since
        self._overdue: set[str] = set()
        self._report = CopyReport()
        self._engines: CopyEngines | None = None  # until caches are registered

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Without memory that can be copied to, every copy is refused."""
        self._host: torch.Tensor | None = None
        engines: CopyEngines | None = None
        try:
            self._layout = whole_blocks(kv_caches, self._config.num_blocks)
            self._device = next(iter(kv_caches.values())).device
            counted = block_bytes(self._config)
            if self._layout.block_bytes > counted:
                raise TransferError(
                    f"blocks of {self._layout.block_bytes} bytes, {counted} expected"
                )
            num_bytes = self._num_blocks * self._layout.block_bytes
            memory = allocate(num_bytes)
            engines = make_engines(self._device)
            engines.add_host(memory.data_ptr(), num_bytes, is_pinned=False)
            self._host = memory.view(self._num_blocks, -1)
            size = f"{self._num_blocks - 1} blocks, {num_bytes / 1e9:.1f} GB"
            name = engines.name
            log.info("ttlcache: CPU tier of %s on this rank, %s engine", size, name)
        except Exception as error:
            shown = not isinstance(error, TransferError)
            log.error("ttlcache: no CPU tier on this rank: %s", error, exc_info=shown)
            if engines is not None:
                engines.close()
            engines = CopyEngines(ReferenceEngine(), ReferenceEngine())
        self._engines = engines
        self._stores, self._loads = (
            CopyQueue(direction, engines.engine(direction), self.metrics)
            for direction in Direction
        )

    def load(self, metadata: TierMetadata) -> None:
        if isinstance(metadata.inner, CopyOrders):
            self._loading |= metadata.inner.loads.keys()
            self._overdue = metadata.inner.overdue
            self._start(self._loads, metadata.inner.loads)

    def save(self, metadata: TierMetadata) -> None:
        """Turns that are stored were computed in earlier steps."""
        if isinstance(metadata.inner, CopyOrders):
            self._start(self._stores, metadata.inner.stores)

    def _start(self, queue: CopyQueue, copies: dict[Any, BlockCopy]) -> None:
        """After what this process has given the device to do."""
        if self._host is None:
            queue.fail(copies)
        if self._host is None or not copies:
            return
        event = None
        if self._device.type == "cuda":
            try:
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record(torch.cuda.current_stream(self._device))
            except Exception:
                queue.fail(copies)
                raise
        for key, copy in copies.items():
            queue.submit(key, copy, self._layout, self._host, event)

    def poll(self, finished_ids: Collection[str]) -> Transfers:
        transfers, report = Transfers(), self._report
        for key, seconds in [*self._loads.poll(), *self._stores.poll()]:
            report.ended[key] = 1
            if seconds is None:
                report.failed.add(key)
            elif key in self._loading:
                report.load_s[key] = seconds
        transfers.received = self._loading & (report.ended.keys() | self._overdue)
        # Those that are overdue may still write: their blocks wait for `report.ended`.
        transfers.failed = transfers.received - (report.ended.keys() - report.failed)
        self._loading -= transfers.received
        return transfers

    def report(self) -> CopyReport | None:
        report, self._report = self._report, CopyReport()
        queues = self._stores, self._loads
        has_broken = any(queue.is_broken for queue in queues)
        report.can_copy = self._host is not None and not has_broken
        # The scheduler's clock of copies runs on reports: vLLM passes on none that is
        # empty, of a step without tokens.
        is_copying = any(queue.is_copying for queue in queues)
        has_news = report.ended or is_copying or not report.can_copy
        return report if has_news else None

    def shutdown(self) -> None:
        if self._engines is not None:
            self._engines.close()
