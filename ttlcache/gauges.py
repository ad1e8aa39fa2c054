"""What the engine's memory and queue look like now, for metrics and autoscalers."""

from __future__ import annotations

from collections.abc import Iterable

from ttlcache.pins import Pin
from ttlcache.requests import RequestRecord


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
