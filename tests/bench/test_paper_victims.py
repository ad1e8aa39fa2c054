"""Which pins rivals' own rules end, on the core alone."""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from bench.sim.rivals import algorithm_1, paper_victims
from bench.sim.rivals.arms import ARMS
from tests.fake_engine import FakeEngine
from ttlcache.config import load_config
from ttlcache.types import PinOutcome, Urgency


def _engine(rule=paper_victims):
    """A, B and C are pinned, in this order, and R waits."""
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
    engine.arrive("r", [1], program="R")
    return engine


def _pinned(engine):
    return {p.program.program_id: p.kv_blocks for p in engine.controller.pins}


def _reclaim(engine, blocks, urgency=Urgency.WAITING, request="r"):
    return engine.controller.memory.reclaim(blocks, urgency, request)


def test_a_newcomer_ends_older_programs_pins_latest_first_and_whole():
    engine = _engine()
    assert _reclaim(engine, 1) == 4
    assert _pinned(engine) == {"A": 4, "B": 4}
    assert _reclaim(engine, 5) == 8
    assert _pinned(engine) == {}
    engine.check()


def test_the_own_pin_goes_only_in_an_engine_that_stands_still():
    engine = _engine()
    for pin in list(engine.controller.pins):
        if pin.program.program_id in "BC":
            engine.controller.memory.reclaimer.turns.end_pin(pin, PinOutcome.VICTIM)
    engine.arrive("A-2", [*range(4), 7, 8], program="A")
    assert _reclaim(engine, 1, request="A-2") == 0
    assert _pinned(engine) == {"A": 4}
    assert _reclaim(engine, 1, Urgency.STALLED, "A-2") == 4
    assert _pinned(engine) == {}


def test_a_running_request_takes_no_more_than_it_needs():
    engine = _engine()
    assert _reclaim(engine, 1, Urgency.RUNNING) == 1
    assert _pinned(engine) == {"A": 4, "B": 4, "C": 3}


@pytest.mark.parametrize("urgency", sorted(set(Urgency) - {Urgency.STALLED}, key=str))
def test_by_the_letter_pins_fall_only_in_an_engine_that_stands_still(urgency):
    engine = _engine(algorithm_1)
    assert _reclaim(engine, 99, urgency) == 0
    assert _pinned(engine) == {"A": 4, "B": 4, "C": 4}
    assert _reclaim(engine, 5, Urgency.STALLED) == 8
    assert _pinned(engine) == {"A": 4}


@pytest.mark.parametrize(
    "arm",
    ["autellix", "cachettl-paper", "cachettl-strict", "continuum-v1", "oracle"],
)
def test_rivals_have_no_bounds_of_ours(arm):
    config = load_config(ARMS[arm].extra_config(1.0))
    assert config.max_queue_wait_s == config.quantum_turns == 1e9
