"""Microseconds of the core on the hot path: `decide`, and a turn's two ends.

`decide` is asked with 10,000 recorded gaps in windows that hold all of them (the
contract suite's history: more than the default windows keep). "warm": nothing
changed since the last decision. "fresh": before each decision a gap is recorded and
a second passes, so that cached curves are stale.

A turn is driven through the real `Controller` as an adapter would: arrive, admit,
prefilled, finish. Contexts have 8,192 tokens in blocks of 16; the programs take
turns, so that no call finds its data in the CPU cache by accident.

All times are CPU time of the thread (its clock costs some 0.2 us a call, included):
on a shared machine wall time has other processes' slices in its 99th percentile.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from bench.micro.overhead_driver import (
    CONTEXT_TOKENS,
    TURN_TOKENS,
    Agent,
    make_controller,
)
from ttlcache import policies
from ttlcache.clock import VirtualClock
from ttlcache.controller import Controller
from ttlcache.testing.policy_contract import SHELL_GAP, filled_history, turn_of, view_of
from ttlcache.types import GapKey

#: Keys whose window is long (6,667 records), absent (so that the global window of
#: 10,000 answers), and short (476, where a curve is always exact).
DECIDE_KEYS = (SHELL_GAP, GapKey("never seen"), GapKey("search"))
#: Open gaps beside the recorded ones: agents of which a tool runs right now.
OPEN_GAPS = (50, 1_000, 10_000)
LIVE_AGENTS = 200
TURNS_PER_AGENT = 10


@dataclass(frozen=True, slots=True)
class Micros:
    """Microseconds a call."""

    median: float
    p99: float
    calls: int


@dataclass(frozen=True, slots=True)
class DecideResult:
    """One policy: of `DECIDE_KEYS`, the one with the highest median counts.

    open_gaps: fresh decisions by the number of gaps open meanwhile.
    """

    policy: str
    warm: Micros
    fresh: Micros
    open_gaps: dict[int, Micros]


@dataclass(frozen=True, slots=True)
class TurnResult:
    """Turns of one policy under one way of telling programs apart.

    both: arrive + finish of the same turn. first_arrive: of a program's first turn,
    where prefix inference searches every block in vain.
    """

    policy: str
    identity: str
    arrive: Micros
    admit: Micros
    finish: Micros
    both: Micros
    first_arrive: Micros
    pins_claimed: int


def micros(samples_ns: Sequence[int]) -> Micros:
    """Median and 99th percentile of nanoseconds."""
    p99 = float(np.percentile(samples_ns, 99))
    return Micros(statistics.median(samples_ns) / 1e3, p99 / 1e3, len(samples_ns))


def time_decide(policy_name: str, repeats: int) -> DecideResult:
    """`decide` of one policy with its default options."""

    def slowest(fresh: bool, open_gaps: int = OPEN_GAPS[0]) -> Micros:
        timed = [
            _time_decide(policy_name, key, repeats, fresh, open_gaps)
            for key in DECIDE_KEYS
        ]
        return max(timed, key=lambda m: m.median)

    return DecideResult(
        policy=policy_name,
        warm=slowest(fresh=False),
        fresh=slowest(fresh=True),
        open_gaps={count: slowest(True, count) for count in OPEN_GAPS[1:]},
    )


def _time_decide(
    policy_name: str, key: GapKey, repeats: int, fresh: bool, open_gaps: int
) -> Micros:
    policy = policies.create(policy_name)
    history = filled_history()
    for number in range(open_gaps - history.num_open):
        history.start(("more", number), DECIDE_KEYS[number % 3], now_s=60.0)
    view = view_of(history)
    turn = turn_of(key)
    gaps_s = np.random.default_rng(1).lognormal(0.0, 1.5, repeats).tolist()
    policy.decide(turn, view)
    samples_ns = []
    gc.collect()
    for number, gap_s in enumerate(gaps_s):
        if fresh:
            history.observe(key, gap_s)
            view = view._replace(now_s=60.0 + number)
        began_ns = time.thread_time_ns()
        policy.decide(turn, view)
        samples_ns.append(time.thread_time_ns() - began_ns)
    return micros(samples_ns)


def time_turns(policy_name: str, identity: str, repeats: int) -> TurnResult:
    """`repeats` turns through a controller whose gap history is full."""
    clock = VirtualClock()
    controller = make_controller(policy_name, clock, gaps=filled_history())
    stamps = _Stamps()
    live = max(2, min(LIVE_AGENTS, repeats // TURNS_PER_AGENT))
    agents = [Agent(number, identity, CONTEXT_TOKENS) for number in range(live)]
    made = live
    gc.collect()
    for step in range(repeats):
        slot = step % live
        if agents[slot].turns == TURNS_PER_AGENT:
            agents[slot] = Agent(made, identity, CONTEXT_TOKENS)
            made += 1
        _one_turn(controller, agents[slot], stamps)
        clock.advance(1.0 / live)  # each agent is away for about a second
        controller.tick()
    return TurnResult(
        policy=policy_name,
        identity=identity,
        arrive=micros(stamps.arrive),
        admit=micros(stamps.admit),
        finish=micros(stamps.finish),
        both=micros([a + f for a, f in zip(stamps.arrive, stamps.finish, strict=True)]),
        first_arrive=micros(stamps.first_arrive),
        pins_claimed=controller.telemetry.metrics.totals["pins", "claimed"],
    )


@dataclass(slots=True)
class _Stamps:
    """Nanoseconds by call; only `first_arrive` is of first turns."""

    arrive: list[int] = field(default_factory=list)
    admit: list[int] = field(default_factory=list)
    finish: list[int] = field(default_factory=list)
    first_arrive: list[int] = field(default_factory=list)


def _one_turn(controller: Controller, agent: Agent, stamps: _Stamps) -> None:
    is_first = agent.turns == 0
    arrival = agent.arrival(is_last=agent.turns + 1 == TURNS_PER_AGENT)
    began_ns = time.thread_time_ns()
    controller.arrive(arrival)
    arrive_ns = time.thread_time_ns() - began_ns
    began_ns = time.thread_time_ns()
    controller.on_allocated(arrival.request_id, arrival.num_tokens - TURN_TOKENS)
    admit_ns = time.thread_time_ns() - began_ns
    controller.prefilled(arrival.request_id, arrival.num_tokens)
    finish = agent.finish()
    began_ns = time.thread_time_ns()
    controller.finish(finish)
    finish_ns = time.thread_time_ns() - began_ns
    if is_first:
        stamps.first_arrive.append(arrive_ns)
    elif not arrival.hints.is_last_step:  # which has no gap to decide on
        stamps.arrive.append(arrive_ns)
        stamps.admit.append(admit_ns)
        stamps.finish.append(finish_ns)
