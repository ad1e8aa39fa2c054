"""Real vLLM schedulers with our connector, a virtual clock, no model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from vllm.config.logging import LoggingConfig
from vllm.logger import configure_logging_if_needed

from tests.connector.fake_tier import FakeTier
from tests.connector.injection import InjectedError
from ttlcache.clock import VirtualClock, use_clock
from ttlcache_connector.role.invariants import violations
from ttlcache_connector.tiers.lmcache.tier import LMCache
from ttlcache_sim.harness import EngineHarness, EngineSpec

OUR_LOGGERS = ("vllm.ttlcache_connector", "ttlcache")
HOLD_5S = {"policy": "fixed", "policy_options": {"ttl_s": 5.0}}
FOREVER = {"policy": "fixed", "policy_options": {"ttl_s": 300.0}}
#: And as many pins as there is memory.
HOLD_ALL = {**FOREVER, "max_pinned_fraction": 1.0}
VLLM_OWN = "vllm.v1.core.sched.scheduler.Scheduler"
ASKING = "tests.connector.own_scheduler.OwnScheduler"


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
    counted = totals(engine)
    claimed = counted.get("claimed_tokens", 0)
    assert 0 <= counted.get("prefill_tokens_saved", 0) <= claimed


def fails(*_: Any, **__: Any) -> None:
    """Stands in for what a test breaks."""
    raise InjectedError


def start(engine, program, tokens, *, turn=1, max_tokens=10, base=None, **hints):
    """A turn of a program whose tokens are its own, or those that begin at `base`."""
    first = 1000 * (base if base is not None else ord(program))
    return engine.add(
        f"{program}-{turn}",
        range(first, first + tokens),
        max_tokens=max_tokens,
        hints={"program_id": program, "tool": "bash", **hints},
    )


def begin(engine, *args, **kwargs):
    """Such a turn, of which one step has run."""
    request = start(engine, *args, **kwargs)
    engine.step()
    return request


def started(engine: Engine, steps: int = 3) -> list[str]:
    """A few steps; the requests that got memory in them."""
    outputs = [engine.step() for _ in range(steps)]
    return [new.req_id for output in outputs for new in output.scheduled_new_reqs]


def totals(engine: Engine) -> dict[str, int]:
    """Counters so far, as "name" or "name:label"."""
    counter = engine.controller.telemetry.metrics.totals
    return {f"{n}:{label}" if label else n: c for (n, label), c in counter.items()}


def expired_pins(engine: Engine) -> int:
    """Counted ones, and those whose programs may still come back."""
    programs = engine.controller.programs
    turns = [turn for program in programs for turn in program.awaited_turns]
    counted = totals(engine).get("pins:expired", 0)
    return counted + sum(turn.has_expired_pin for turn in turns)


def pinned(engine: Engine) -> int:
    return engine.holder.pressure().pinned_blocks


def copying(engine: Engine) -> int:
    """Blocks of ended turns that are held for their copy."""
    return engine.role.parts.above_tier.unpinned.awaiting_copy_blocks


def free(engine: Engine) -> int:
    return engine.pool.get_num_free_blocks()


@pytest.fixture
def tier(monkeypatch: pytest.MonkeyPatch) -> FakeTier:
    fake = FakeTier()
    monkeypatch.setattr(LMCache, "scheduler_half", lambda *_: fake)
    return fake


@pytest.fixture
def our_log() -> Iterator[list[str]]:
    """Messages that our loggers emitted."""
    # A process's first engine does it, and would drop our handler.
    configure_logging_if_needed(LoggingConfig())
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
