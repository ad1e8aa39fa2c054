"""Real vLLM schedulers with our connector, a virtual clock, no model."""

from __future__ import annotations

import logging
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


@pytest.fixture
def clock() -> Iterator[VirtualClock]:
    with use_clock(VirtualClock(100.0)) as virtual:
        yield virtual


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def async_scheduling(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def make_engine(clock: VirtualClock) -> Callable[..., EngineHarness]:
    """Engines whose invariants are checked after every step."""

    def make(**spec: Any) -> EngineHarness:
        spec.setdefault("extra_config", HOLD_5S)
        engine = EngineHarness(replace(EngineSpec(), **spec))
        engine.on_step = lambda: check(engine)
        return engine

    return make


def check(engine: EngineHarness) -> None:
    role = engine.connector.scheduler_role
    assert violations(engine.scheduler, role.parts.controller, role.parts.ledger) == []
    assert role.parts.faults.total == 0


def totals(engine: EngineHarness) -> dict[str, int]:
    """Counters so far, as "name" or "name:label"."""
    counter = engine.connector.scheduler_role.parts.controller.telemetry.metrics.totals
    return {f"{n}:{label}" if label else n: c for (n, label), c in counter.items()}


def pinned(engine: EngineHarness) -> int:
    return engine.connector.scheduler_role.parts.ledger.pressure().pinned_blocks


def demoting(engine: EngineHarness) -> int:
    """Blocks of ended turns that are held for their copy."""
    return engine.connector.scheduler_role.parts.demoting.expired.copying_blocks


def free(engine: EngineHarness) -> int:
    return engine.pool.get_num_free_blocks()


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
