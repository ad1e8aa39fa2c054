"""Real vLLM schedulers with our connector, a virtual clock, no model."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from bench.sim.harness import EngineHarness, EngineSpec
from tests.connector.fake_tier import FakeTier
from ttlcache.clock import VirtualClock, use_clock
from ttlcache_connector.role import build
from ttlcache_connector.role.invariants import violations

OUR_LOGGERS = ("vllm.ttlcache_connector", "ttlcache")
HOLD_5S = {"policy": "fixed", "policy_options": {"ttl_s": 5.0}}
FOREVER = {"policy": "fixed", "policy_options": {"ttl_s": 300.0}}
#: And as many pins as there is memory.
HOLD_ALL = {**FOREVER, "max_pinned_fraction": 1.0}


@pytest.fixture
def clock() -> Iterator[VirtualClock]:
    with use_clock(VirtualClock(100.0)) as virtual:
        yield virtual


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def async_scheduling(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


class Engine(EngineHarness):
    """With what tests look at."""

    @property
    def role(self) -> Any:
        return self.connector.scheduler_role

    @property
    def controller(self) -> Any:
        return self.role.parts.controller

    @property
    def holder(self) -> Any:
        return self.role.parts.holder


@pytest.fixture
def make_engine(clock: VirtualClock) -> Callable[..., Engine]:
    """Engines whose invariants are checked after every step."""

    def make(**spec: Any) -> Engine:
        spec.setdefault("extra_config", HOLD_5S)
        engine = Engine(replace(EngineSpec(), **spec))
        engine.on_step = lambda: check(engine)
        return engine

    return make


def check(engine: Engine) -> None:
    role = engine.role
    assert violations(engine.scheduler, role.parts.controller, role.parts.holder) == []
    assert role.parts.faults.total == 0


def totals(engine: Engine) -> dict[str, int]:
    """Counters so far, as "name" or "name:label"."""
    counter = engine.controller.telemetry.metrics.totals
    return {f"{n}:{label}" if label else n: c for (n, label), c in counter.items()}


def pinned(engine: Engine) -> int:
    return engine.holder.pressure().pinned_blocks


def demoting(engine: Engine) -> int:
    """Blocks of ended turns that are held for their copy."""
    return engine.role.parts.demoting.expired.copying_blocks


def free(engine: Engine) -> int:
    return engine.pool.get_num_free_blocks()


def play_on_a_tiny_pool(
    make_engine: Callable[..., Engine],
    rng: random.Random,
    num_programs: int,
    clock: Any,
    **spec: Any,
) -> None:
    """Programs of four turns, each with what its model said and a tool's result."""
    engine = make_engine(
        num_blocks=24, max_num_seqs=4, max_num_batched_tokens=64, **spec
    )
    contexts = {f"P{i}": [i] * rng.randrange(5, 60) for i in range(num_programs)}
    for turn in range(4):
        for program, context in contexts.items():
            engine.add(
                f"{program}-{turn}",
                context + [rng.randrange(1000)] * rng.randrange(1, 20),
                max_tokens=rng.randrange(1, 12),
                hints={"program_id": program, "is_last_step": turn == 3},
            )
            for _ in range(rng.randrange(3)):
                engine.step()
        engine.run(max_steps=2000)
        for program in contexts:
            request = engine.finished[f"{program}-{turn}"]
            contexts[program] = list(request.all_token_ids)
        clock.advance(rng.uniform(-1, 20))
    assert free(engine) == 23


@pytest.fixture
def tier(monkeypatch: pytest.MonkeyPatch) -> FakeTier:
    fake = FakeTier()
    monkeypatch.setattr(build, "scheduler_tier", lambda *_: fake)
    return fake


@pytest.fixture
def our_log() -> Iterator[list[str]]:
    """Messages that our loggers emitted."""
    messages: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    handler = Collect()
    ours = [logging.getLogger(name) for name in OUR_LOGGERS]
    for each in ours:
        each.addHandler(handler)
    yield messages
    for each in ours:
        each.removeHandler(handler)
