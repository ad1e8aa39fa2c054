"""What the engine's memory and queue look like now, for metrics and autoscalers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ttlcache.programs.model import Pin, RequestRecord

if TYPE_CHECKING:
    from ttlcache.controller import Controller


def gauges_of(controller: Controller, now_s: float) -> dict[str, float]:
    """What the controller knows, by the names of `metrics.GAUGES`."""
    requests = controller.requests.values()
    return {
        "pins_active": len(controller.pins),
        "programs_active": len(controller.programs),
        "waiting_programs": num_waiting_programs(requests),
        "working_set_blocks": working_set_blocks(
            requests,
            controller.pins,
            controller.block_tokens,
            controller.config.admission_half_life_s,
            now_s,
        ),
        "growth_blocks": controller.growth_blocks,
        "lower_tier_kept_share": controller.costs.kept_share,
        "queueing_delay_seconds": controller.costs.queueing_delay_s,
        "memoryfulness": controller.memoryfulness.eta,
        "seniority_quantum_seconds": controller.places.quantum.seconds,
        "retention_enabled": float(controller.retention_enabled),
        "recorder_dropped_events": float(controller.journal.dropped),
    }


def working_set_blocks(
    records: Iterable[RequestRecord],
    pins: Iterable[Pin],
    block_tokens: int,
    half_life_s: float,
    now_s: float,
) -> float:
    """What running requests take, and pins: less, the longer their tool runs."""
    admitted = (r for r in records if r.admitted_s is not None)
    running = sum(r.num_tokens for r in admitted) / block_tokens
    waits_s = ((pin.kv_blocks, max(0.0, now_s - pin.created_s)) for pin in pins)
    held = sum(n * 2.0 ** (-wait_s / half_life_s) for n, wait_s in waits_s)
    return float(running + held)


def num_waiting_programs(records: Iterable[RequestRecord]) -> int:
    """Programs of which a request was not given memory yet."""
    waiting = (r.program for r in records if r.admitted_s is None)
    return len(set(map(id, waiting)))
