"""Admission control, asked by vLLM's real scheduler.

28 blocks of 16 tokens. Five programs ended with 10 blocks each. A's tool runs, and its
3 blocks are pinned; D takes 10 and decodes for long; E needs 4, and 6 more are expected
of it as of A: 16 where 15 are free.
"""

from functools import partial

import pytest

from tests.connector.conftest import ASKING, free, pinned, start, started
from ttlcache.scheduling import admission
from ttlcache.types import Admission, Urgency

CONTROL = {
    "policy": "fixed",
    "policy_options": {"ttl_s": 200.0},
    "admission": "room-to-grow",
}


@pytest.fixture(autouse=True)
def all_growth_is_reserved(monkeypatch):
    monkeypatch.setattr(admission, "GROWTH_SHARE", 1.0)


add = partial(start, max_tokens=4)


@pytest.fixture
def make_full(make_engine):
    """A's tool runs, D decodes, E waits at the head of the queue."""

    def make(config=(), **spec):
        extra = {**CONTROL, **dict(config)}
        engine = make_engine(num_blocks=29, extra_config=extra, **spec)
        for program in "VWXYZ":
            add(engine, program, 156, is_last_step=True)
            engine.run()
        add(engine, "A", 60)
        engine.run()
        add(engine, "D", 156, max_tokens=150)
        assert started(engine) == ["D-1"]
        add(engine, "E", 60)
        return engine

    return make


@pytest.fixture
def full_engine(make_full, async_scheduling):
    return lambda **config: make_full(config, async_scheduling=async_scheduling)


def finish_all(engine, clock):
    engine.run(max_steps=1000)
    clock.advance(301.0)
    engine.step()
    assert free(engine) == 28
    assert engine.controller.requests == {}


def test_a_new_program_waits_although_its_prompt_would_fit(full_engine, clock, our_log):
    engine = full_engine()
    assert any("admission=room-to-grow" in line for line in our_log)
    assert free(engine) >= 4
    assert started(engine, 20) == []
    assert [r.request_id for r in engine.scheduler.waiting] == ["E-1"]
    # Its wait makes memory dear: others' worth would keep it out for ever.
    assert engine.holder.pressure().memory_is_short
    finish_all(engine, clock)
    assert "E-1" in engine.finished


@pytest.mark.parametrize(
    ("config", "late_s"),
    [({}, 200.0), ({"max_queue_wait_s": 30.0}, 30.0)],
    ids=["the pin has expired", "it has waited too long"],
)
def test_it_starts_when(full_engine, clock, config, late_s):
    engine = full_engine(**config)
    clock.advance(late_s - 1.0)
    assert started(engine) == []
    clock.advance(2.0)
    assert started(engine) == ["E-1"]
    finish_all(engine, clock)


def test_without_admission_control_it_does_not_wait(full_engine, clock):
    engine = full_engine(admission="none")
    assert started(engine) == ["E-1"]
    finish_all(engine, clock)


def test_it_starts_when_nothing_runs(full_engine, clock):
    # Scenario: D is done, too, and pinned: less than ever is free.
    engine = full_engine()
    while "D-1" not in engine.finished:
        assert started(engine, 1) == []
    assert started(engine, 2) == ["E-1"]
    finish_all(engine, clock)


def test_new_programs_start_in_order_when_a_program_ends(full_engine, clock):
    # F behind E is smaller, but does not pass it; E's side request goes with E.
    engine = full_engine()
    add(engine, "F", 20)
    add(engine, "E", 10, turn=2, base=5)
    assert started(engine) == []
    engine.controller.end_program("", "A")
    assert started(engine, 1) == ["E-1", "E-2"]
    finish_all(engine, clock)
    assert "F-1" in engine.finished


def test_programs_that_have_started_pass_whom_only_growth_holds_back(
    full_engine, clock
):
    engine = full_engine()
    assert started(engine, 1) == []
    add(engine, "A", 20, turn=2, base=5)
    assert started(engine, 1) == ["A-2"]
    assert [r.request_id for r in engine.scheduler.waiting] == ["E-1"]
    finish_all(engine, clock)
    assert "E-1" in engine.finished


def test_a_newcomer_is_passed_for_a_quantum(full_engine, clock):
    engine = full_engine()
    assert started(engine, 1) == []
    queue = engine.controller.queue
    queue.quantum.on_turn(1.0, is_first=False)
    clock.advance(queue.quantum.seconds + 1.0)
    queue.last_started_s = clock.now_s() + 1.0  # turns start all the time
    add(engine, "A", 20, turn=2, base=5)
    assert started(engine) == []
    finish_all(engine, clock)
    assert {"A-2", "E-1"} <= engine.finished.keys()


def test_nothing_passes_a_newcomer_that_does_not_fit(full_engine, clock):
    engine = full_engine()
    engine.abort("E-1")
    add(engine, "F", 320)
    assert started(engine, 1) == []
    add(engine, "A", 20, turn=2, base=5)
    assert started(engine) == []
    finish_all(engine, clock)
    assert {"A-2", "F-1"} <= engine.finished.keys()


def test_an_aborted_wait_is_over(full_engine, clock):
    engine = full_engine()
    engine.abort("E-1")
    assert started(engine) == []
    finish_all(engine, clock)
    assert "E-1" not in engine.finished


def test_a_foreign_scheduler_that_asks_holds_new_programs_back(make_full):
    engine = make_full(scheduler_cls=ASKING)
    (request,) = engine.scheduler.waiting
    connector = engine.connector
    assert started(engine, 5) == []
    before = free(engine), pinned(engine)
    assert connector.admission(request, 4) is Admission.WAIT
    assert (free(engine), pinned(engine)) == before
    assert connector.eviction(4, request, Urgency.HELD_BACK) == 0
    add(engine, "A", 70, turn=2)
    assert started(engine) == ["A-2"]
    engine.run(max_steps=1000)
    assert "E-1" in engine.finished
