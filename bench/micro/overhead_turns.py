"""Microseconds of the core on the hot path: a turn's two ends.

A turn is driven through the real `Controller` as an adapter would: arrive, admit,
prefilled, finish, with 10,000 recorded gaps in windows that hold all of them (the
contract suite's history: more than the default windows keep). Every arrival records
one more, so that `finish` decides on curves that are stale. Contexts have 8,192 tokens
in blocks of 16; the programs take turns, so that no call finds its data in the CPU
cache by accident. First and last turns do not count: they have no gap to end, or none
to decide on.

All times are CPU time of the thread (its clock costs some 0.2 us a call, included):
on a shared machine wall time has other processes' slices in its 99th percentile.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bench.micro.overhead_driver import (
    CONTEXT_TOKENS,
    TURN_TOKENS,
    Agent,
    make_controller,
)
from ttlcache.clock import VirtualClock
from ttlcache.controller import Controller
from ttlcache.testing.policy_contract import filled_history

LIVE_AGENTS = 200
TURNS_PER_AGENT = 10


@dataclass(frozen=True, slots=True)
class Micros:
    """Microseconds a call."""

    median: float
    p99: float
    calls: int


@dataclass(frozen=True, slots=True)
class TurnResult:
    """Turns of one policy under one way of telling programs apart.

    both: arrive + finish of the same turn.
    """

    policy: str
    identity: str
    arrive: Micros
    finish: Micros
    both: Micros


def micros(samples_ns: Sequence[int]) -> Micros:
    """Median and 99th percentile of nanoseconds."""
    p99 = float(np.percentile(samples_ns, 99))
    return Micros(statistics.median(samples_ns) / 1e3, p99 / 1e3, len(samples_ns))


def time_turns(policy_name: str, identity: str, repeats: int) -> TurnResult:
    """`repeats` turns through a controller whose gap history is full."""
    clock = VirtualClock()
    controller = make_controller(policy_name, clock, gaps=filled_history())
    live = max(2, min(LIVE_AGENTS, repeats // TURNS_PER_AGENT))
    agents = [Agent(number, identity, CONTEXT_TOKENS) for number in range(live)]
    made = live
    stamps: list[tuple[int, int]] = []
    gc.collect()
    for step in range(repeats):
        slot = step % live
        if agents[slot].turns == TURNS_PER_AGENT:
            agents[slot] = Agent(made, identity, CONTEXT_TOKENS)
            made += 1
        counts = 0 < agents[slot].turns < TURNS_PER_AGENT - 1
        stamp = _time_turn(controller, agents[slot])
        if counts:
            stamps.append(stamp)
        clock.advance(1.0 / live)  # each agent is away for about a second
        controller.tick()
    arrive, finish = zip(*stamps, strict=True)
    both = [sum(stamp) for stamp in stamps]
    timed = (micros(arrive), micros(finish), micros(both))
    return TurnResult(policy_name, identity, *timed)


def _time_turn(controller: Controller, agent: Agent) -> tuple[int, int]:
    """Nanoseconds of the turn's arrival and of its end."""
    arrival = agent.arrival(is_last=agent.turns + 1 == TURNS_PER_AGENT)
    began_ns = time.thread_time_ns()
    controller.on_arrival(arrival)
    arrive_ns = time.thread_time_ns() - began_ns
    controller.on_allocated(arrival.request_id, arrival.num_tokens - TURN_TOKENS)
    controller.on_prefilled(arrival.request_id)
    finish = agent.finish()
    began_ns = time.thread_time_ns()
    controller.on_finished(finish)
    return arrive_ns, time.thread_time_ns() - began_ns
