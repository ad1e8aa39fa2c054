"""A million programs through one controller, and the bytes that a live one keeps.

The programs are known by hint, by session and by prefix in equal parts. Those with
hints announce their end; the others fall silent and are forgotten after
`IDLE_S` seconds of virtual time (less in a short run: half of its first tenth), so
that the table holds some 14,000 programs of which `LIVE_AGENTS` are active, each
away for about a second at a time. Contexts are short: they cost the driver time.
"""

from __future__ import annotations

import gc
import random
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass

from bench.micro.overhead_driver import (
    IDENTITIES,
    Agent,
    make_controller,
    rss_bytes,
)
from ttlcache.clock import VirtualClock
from ttlcache.controller import Controller

CHUNKS = 10
LIVE_AGENTS = 1_000
TURNS = 3
IDLE_S = 60.0
CONTEXT_TOKENS = 1_024


@dataclass(frozen=True, slots=True)
class Chunk:
    """A tenth of the programs.

    seconds: CPU time of this chunk, the driver's own included; others on the machine
        do not count. rss_bytes: at its end.
    live: programs in the table then.
    """

    programs: int
    seconds: float
    rss_bytes: int
    live: int


@dataclass(frozen=True, slots=True)
class Kept:
    """Bytes that one live idle program keeps.

    bytes_each: after its pin expired: table entry, open turn, gap start.
    """

    identity: str
    programs: int
    bytes_each: float


def run_programs(
    num_programs: int, policy: str, on_chunk: Callable[[Chunk], None]
) -> list[Chunk]:
    """Send `num_programs` programs of `TURNS` turns through one controller."""
    clock = VirtualClock()
    live = min(LIVE_AGENTS, max(1, num_programs // CHUNKS))
    first_tenth_s = TURNS * num_programs / CHUNKS / live
    idle_s = min(IDLE_S, first_tenth_s / 2)
    controller = make_controller(policy, clock, program_idle_s=idle_s)
    agents = [_agent(number) for number in range(live)]
    started = live
    chunks: list[Chunk] = []
    rng = random.Random(0)
    ended, began_s = 0, time.process_time()
    while ended < num_programs:
        for slot in range(live):
            agent = agents[slot]
            _turn(controller, agent)
            clock.advance((0.5 + rng.random()) / live)
            controller.tick()
            if agent.turns < TURNS:
                continue
            ended += 1
            agents[slot] = _agent(started)
            started += 1
            if ended * CHUNKS >= (len(chunks) + 1) * num_programs:
                # As an adapter would, now and then.
                controller.telemetry.metrics.drain()
                seconds = time.process_time() - began_s
                live_now = len(controller.programs)
                chunks.append(Chunk(ended, seconds, rss_bytes(), live_now))
                on_chunk(chunks[-1])
                began_s = time.process_time()
    return chunks


def _agent(number: int) -> Agent:
    return Agent(number, IDENTITIES[number % 3], CONTEXT_TOKENS)


def _turn(controller: Controller, agent: Agent) -> None:
    arrival = agent.arrival(is_last=agent.turns + 1 == TURNS)
    record = controller.arrive(arrival)
    controller.on_allocated(arrival.request_id, record.reusable_tokens)
    controller.prefilled(arrival.request_id, arrival.num_tokens)
    controller.finish(agent.finish())


def measure_kept(num_programs: int, identity: str, policy: str) -> Kept:
    """Start `num_programs` programs, let each finish one turn, and weigh them."""
    clock = VirtualClock()
    controller = make_controller(policy, clock)
    warm_up = max(10, num_programs // 50)  # what is allocated once
    for number in range(warm_up):
        _turn(controller, Agent(number, identity, CONTEXT_TOKENS))
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for number in range(warm_up, warm_up + num_programs):
            # The driver's agent dies here; what is left belongs to the controller.
            _turn(controller, Agent(number, identity, CONTEXT_TOKENS))
        clock.advance(controller.config.max_ttl_s + 1.0)
        controller.tick()
        assert len(controller.pins) == 0
        assert len(controller.programs) >= num_programs
        controller.telemetry.metrics.drain()
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return Kept(identity, num_programs, (after - before) / num_programs)
