"""The bytes that a live program keeps; contexts are short, as they cost time."""

from __future__ import annotations

import gc
import tracemalloc
from dataclasses import dataclass

from bench.micro.overhead_driver import Agent, make_controller
from ttlcache.clock import VirtualClock
from ttlcache.controller import Controller
from ttlcache.estimators.plain_cache import MAX_CONTEXTS

CONTEXT_TOKENS = 1_024


@dataclass(frozen=True, slots=True)
class Kept:
    """Bytes that one live idle program keeps.

    bytes_each: after its pin expired: table entry, awaited turn, gap start.
    """

    identity: str
    programs: int
    bytes_each: float


def _turn(controller: Controller, agent: Agent) -> None:
    arrival = agent.arrival()
    record = controller.on_arrival(arrival)
    controller.on_allocated(arrival.request_id, record.reusable_tokens)
    controller.on_prefilled(arrival.request_id)
    controller.on_finished(agent.finish())


def _rest(controller: Controller, clock: VirtualClock) -> None:
    """All pins expire."""
    clock.advance(controller.config.max_ttl_s + 1.0)
    while len(controller.pins):
        controller.tick()
    controller.telemetry.metrics.drain()
    gc.collect()


def measure_kept(num_programs: int, identity: str, policy: str) -> Kept:
    """Start `num_programs` programs, let each finish one turn, and weigh them."""
    clock = VirtualClock()
    controller = make_controller(policy, clock)
    warm_up = max(MAX_CONTEXTS, num_programs // 50)  # what is allocated once
    tracemalloc.start()
    try:
        for number in range(warm_up):
            _turn(controller, Agent(number, identity, CONTEXT_TOKENS))
        _rest(controller, clock)
        before, _ = tracemalloc.get_traced_memory()
        for number in range(warm_up, warm_up + num_programs):
            # The driver's agent dies here; what is left belongs to the controller.
            _turn(controller, Agent(number, identity, CONTEXT_TOKENS))
        _rest(controller, clock)
        assert len(controller.programs) >= num_programs
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return Kept(identity, num_programs, (after - before) / num_programs)
