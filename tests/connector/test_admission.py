"""Admission control, asked by vLLM's real scheduler.

28 blocks of 16 tokens. Five programs ended with 10 blocks each. A's tool runs, and its
3 blocks are pinned; D takes 10 and decodes for long; E needs 4, and 6 more are expected
of it as of A: 16 where 15 are free.
"""

from __future__ import annotations

import random
from functools import partial

import pytest

from tests.connector.conftest import free, play_on_a_tiny_pool
from tests.connector.test_allocation import start
from ttlcache.scheduling import admission
from ttlcache.types import GapKey

CONTROL = {
    "policy": "fixed",
    "policy_options": {"ttl_s": 200.0},
    "admission": "room-to-grow",
}


@pytest.fixture(autouse=True)
def all_growth_is_reserved(monkeypatch):
    monkeypatch.setattr(admission, "GROWTH_SHARE", 1.0)


add = partial(start, max_tokens=4)


def step(engine, count=3):
    """A few steps; the ids of the requests that got memory in them."""
    scheduled = []
    for _ in range(count):
        scheduled += [new.req_id for new in engine.step().scheduled_new_reqs]
    return scheduled


@pytest.fixture
def full_engine(make_engine, async_scheduling):
    """A's tool runs, D decodes, E waits at the head of the queue."""

    def make(**config):
        engine = make_engine(
            num_blocks=29,
            async_scheduling=async_scheduling,
            extra_config={**CONTROL, **config},
        )
        for program in "VWXYZ":
            add(engine, program, 156, is_last_step=True)
            engine.run()
        add(engine, "A", 60)
        engine.run()
        add(engine, "D", 156, max_tokens=150)
        assert step(engine) == ["D-1"]
        add(engine, "E", 60)
        return engine

    return make


def finish_all(engine, clock):
    engine.run(max_steps=1000)
    clock.advance(301.0)
    engine.step()
    assert free(engine) == 28
    assert engine.controller.requests == {}


def test_a_new_program_waits_although_its_prompt_would_fit(full_engine, clock):
    engine = full_engine()
    assert free(engine) >= 4
    assert step(engine, 20) == []
    assert [r.request_id for r in engine.scheduler.waiting] == ["E-1"]
    finish_all(engine, clock)
    assert "E-1" in engine.finished


def test_its_wait_makes_memory_dear(full_engine, clock):
    """What others hold beyond its worth would keep it out for ever."""
    engine = full_engine()
    step(engine)
    assert engine.holder.pressure().wanted_blocks == 4
    finish_all(engine, clock)


def test_it_starts_when_the_pin_has_expired(full_engine, clock):
    engine = full_engine()
    clock.advance(199.0)
    assert step(engine) == []
    clock.advance(2.0)
    assert step(engine) == ["E-1"]
    finish_all(engine, clock)


def test_pins_made_while_memory_was_free_end_when_a_newcomer_is_held_back(
    make_engine, clock
):
    # A's pin was given for as long as there is, at no price.
    engine = make_engine(
        num_blocks=29,
        extra_config={"max_ttl_s": 1e9},
    )
    controller = engine.controller
    for gap_s in [1.0] * 60:
        controller.gaps.observe(GapKey("bash"), gap_s)
    for program in "VWXYZ":
        add(engine, program, 156, is_last_step=True)
        engine.run()
    add(engine, "A", 60)
    engine.run()
    clock.advance(10.0)  # nobody who was away for so long has come back
    assert len(controller.pins) == 1
    add(engine, "D", 156, max_tokens=150)
    assert step(engine) == ["D-1"]
    assert len(controller.pins) == 1
    add(engine, "E", 60, max_tokens=150)
    assert step(engine) == ["E-1"]
    assert len(controller.pins) == 0


def test_without_admission_control_it_does_not_wait(full_engine, clock):
    engine = full_engine(admission="none")
    assert step(engine) == ["E-1"]
    finish_all(engine, clock)


def test_it_starts_when_a_program_ends(full_engine, clock):
    engine = full_engine()
    assert step(engine) == []
    engine.controller.end("", "A")
    assert step(engine) == ["E-1"]
    finish_all(engine, clock)


def test_it_starts_when_it_has_waited_too_long(full_engine, clock):
    engine = full_engine(max_queue_wait_s=30.0)
    clock.advance(29.0)
    assert step(engine) == []
    clock.advance(2.0)
    assert step(engine) == ["E-1"]
    finish_all(engine, clock)


def test_it_starts_when_nothing_runs(full_engine, clock):
    # Scenario: D is done, too, and pinned: less than ever is free.
    engine = full_engine()
    while "D-1" not in engine.finished:
        assert step(engine, 1) == []
    assert step(engine, 2) == ["E-1"]
    finish_all(engine, clock)


def test_programs_under_way_are_never_held_back(full_engine, clock):
    # Scenario: A comes back while E waits. It is served; E goes on waiting.
    engine = full_engine()
    add(engine, "A", 70, turn=2)
    assert step(engine) == ["A-2"]
    assert [r.request_id for r in engine.scheduler.waiting] == ["E-1"]
    finish_all(engine, clock)


def test_new_programs_start_in_order(full_engine, clock):
    # F behind E is smaller, but does not pass it.
    engine = full_engine()
    add(engine, "F", 20)
    assert step(engine) == []
    engine.controller.end("", "A")
    assert step(engine, 1) == ["E-1"]
    finish_all(engine, clock)
    assert "F-1" in engine.finished


def test_an_aborted_wait_leaves_nothing_behind(full_engine, clock):
    engine = full_engine()
    engine.abort("E-1")
    assert step(engine) == []
    finish_all(engine, clock)
    assert "E-1" not in engine.finished


def test_a_sub_agent_of_a_program_under_way_is_not_held_back(full_engine, clock):
    engine = full_engine()
    engine.abort("E-1")
    add(engine, "S", 60, parent_id="A")
    assert step(engine) == ["S-1"]
    finish_all(engine, clock)


@pytest.mark.parametrize("seed", range(6))
def test_random_programs_under_admission_control_never_wedge(make_engine, clock, seed):
    rng = random.Random(seed)
    ordering = rng.choice(["ttl-aware", "program-fcfs"])
    extra = {**CONTROL, "max_pinned_fraction": 1.0, "ordering": ordering}
    spec = {"async_scheduling": bool(seed % 2), "extra_config": extra}
    play_on_a_tiny_pool(make_engine, rng, rng.randrange(2, 8), clock, **spec)
