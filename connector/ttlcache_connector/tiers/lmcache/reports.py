"""What a worker reports of a step: stores that ended, and times of loads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lmcache.integration.vllm.lmcache_mp_metadata import LMCacheMPWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata


@dataclass
class WorkerReport(LMCacheMPWorkerMetadata):
    """load_s: seconds of the loads that ended, by request; of the slowest rank."""

    load_s: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(
        cls, stores: KVConnectorWorkerMetadata | None, load_s: Mapping[str, float]
    ) -> WorkerReport:
        """LMCache's own report, None where there is none, and ours."""
        if not isinstance(stores, LMCacheMPWorkerMetadata):
            return cls({}, load_s=dict(load_s))
        return cls(
            stores.completed_store_requests,
            stores.failed_store_requests,
            dict(load_s),
        )

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        load_s = dict(self.load_s)
        for request_id, seconds in load_times(other).items():
            load_s[request_id] = max(seconds, load_s.get(request_id, 0.0))
        return WorkerReport.of(super().aggregate(other), load_s)


def load_times(report: object) -> Mapping[str, float]:
    """Of any report of a worker: empty where it has none."""
    return report.load_s if isinstance(report, WorkerReport) else {}
