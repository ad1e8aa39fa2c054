"""The paper's own rules for victims, on the core alone."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from bench.sim.rivals import algorithm_1, paper_victims
from bench.sim.rivals.arms import ARMS
from ttlcache.config import load_config
from ttlcache.testing import FakeEngine
from ttlcache.types import PinOutcome, Urgency


def _engine(rule=paper_victims):
    config = {"policy": "fixed", "policy_options": {"ttl_s": 60.0}}
    engine = FakeEngine(
        config | {"max_pinned_fraction": 1.0}, pool_blocks=32, block_tokens=1
    )
    if rule is not None:
        role = SimpleNamespace(parts=SimpleNamespace(controller=engine.controller))
        rule.gate(None, SimpleNamespace(scheduler_role=role))
    for first, label in enumerate("ABC"):
        start = 1000 * first
        engine.turn(f"{label}-1", list(range(start, start + 4)), [7], program=label)
    return engine


def _pinned(engine):
    return {p.program.program_id: p.kv_blocks for p in engine.controller.pins}


def test_a_newcomer_ends_older_programs_pins_latest_first_and_whole():
    engine = _engine()
    engine.arrive("r", [1], program="R")
    assert engine.controller.memory.reclaim(1, Urgency.WAITING, "r") == 4
    assert _pinned(engine) == {"A": 4, "B": 4}
    assert engine.controller.memory.reclaim(5, Urgency.WAITING, "r") == 8
    assert _pinned(engine) == {}
    engine.check()


def test_ours_ends_none_for_it():
    engine = _engine(rule=None)
    engine.arrive("r", [1], program="R")
    assert engine.controller.memory.reclaim(1, Urgency.WAITING, "r") == 0


def test_too_few_pins_end_all_the_same():
    """The paper looks at what is enough only while it ends them."""
    engine = _engine()
    engine.arrive("r", [1], program="R")
    assert engine.controller.memory.reclaim(99, Urgency.WAITING, "r") == 12
    assert _pinned(engine) == {}


def test_the_own_pin_goes_only_in_an_engine_that_stands_still():
    engine = _engine()
    for label in "BC":
        for pin in list(engine.controller.pins):
            if pin.program.program_id == label:
                engine.controller.memory.reclaimer.turns.end_pin(pin, PinOutcome.VICTIM)
    engine.arrive("A-2", [*range(4), 7, 8], program="A")
    assert engine.controller.memory.reclaim(1, Urgency.WAITING, "A-2") == 0
    assert _pinned(engine) == {"A": 4}
    assert engine.controller.memory.reclaim(1, Urgency.STALLED, "A-2") == 4
    assert _pinned(engine) == {}


def test_a_running_request_takes_no_more_than_it_needs():
    engine = _engine()
    engine.arrive("r", [1], program="R")
    assert engine.controller.memory.reclaim(1, Urgency.RUNNING, "r") == 1
    assert _pinned(engine) == {"A": 4, "B": 4, "C": 3}


@pytest.mark.parametrize("urgency", sorted(set(Urgency) - {Urgency.STALLED}, key=str))
def test_by_the_letter_pins_fall_only_in_an_engine_that_stands_still(urgency):
    engine = _engine(algorithm_1)
    engine.arrive("r", [1], program="R")
    assert engine.controller.memory.reclaim(99, urgency, "r") == 0
    assert _pinned(engine) == {"A": 4, "B": 4, "C": 4}
    assert engine.controller.memory.reclaim(5, Urgency.STALLED, "r") == 8
    assert _pinned(engine) == {"A": 4}


@pytest.mark.parametrize("arm", ["cachettl-paper", "cachettl-strict"])
@pytest.mark.parametrize("name", ["max_queue_wait_s", "quantum_turns"])
def test_the_arms_have_no_bounds_of_ours(arm, name):
    config = load_config(ARMS[arm].extra_config(1.0))
    assert getattr(config, name) == 1e9
