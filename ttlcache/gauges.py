"""What the engine's memory and queue look like now, for metrics and autoscalers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ttlcache.programs.model import RequestRecord

if TYPE_CHECKING:
    from ttlcache.controller import Controller


def gauges_of(controller: Controller) -> dict[str, float]:
    """What the controller knows, by the names of `metrics.GAUGES`."""
    requests = controller.requests.values()
    return {
        "pins_active": len(controller.pins),
        "programs_active": len(controller.programs),
        "waiting_programs": num_waiting_programs(requests),
        "growth_blocks": controller.reserved_pool_blocks,
        "lower_tier_kept_share": controller.costs.kept_share,
        "queueing_delay_seconds": controller.costs.queueing_delay_s,
        "memoryfulness": controller.memoryfulness.eta,
        "seniority_quantum_seconds": controller.queue_order.quantum.seconds,
        "retention_enabled": float(controller.retention_enabled),
        "recorder_dropped_events": float(controller.journal.dropped),
    }


def num_waiting_programs(records: Iterable[RequestRecord]) -> int:
    """Programs of which a request was not given memory yet."""
    waiting = (r.program for r in records if r.admitted_s is None)
    return len(set(map(id, waiting)))
