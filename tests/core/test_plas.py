"""Attained service of programs, as the controller counts it for PLAS."""

from __future__ import annotations

import math

from ttlcache.programs.model import Attained
from ttlcache.testing import FakeEngine

LEVEL = 2  # where a key says the queue


def make_engine():
    return FakeEngine({"policy": "none", "ordering": "plas"}, block_tokens=4)


def call(engine, request_id, program, *, waits_s=0.0, runs_s=0.0):
    """One request of a program that waits, then runs."""
    engine.arrive(request_id, [1, 2, 3], program=program)
    engine.clock.advance(waits_s)
    assert engine.admit(request_id)
    engine.clock.advance(runs_s)
    engine.finish(request_id)


def level(engine, request_id):
    return engine.controller.priority(request_id)[LEVEL]


def attained(engine, label):
    return engine.controller.programs.get(("", label)).attained


def test_service_is_the_time_that_finished_calls_ran():
    engine = make_engine()
    call(engine, "a1", "A", waits_s=9.0, runs_s=1.5)
    call(engine, "a2", "A", waits_s=1.0, runs_s=2.5)
    assert attained(engine, "A") == Attained(4.0, 10.0)
    engine.arrive("a3", [1, 2, 3], program="A")
    assert level(engine, "a3") == 3  # 4 s to 8 s
    engine.admit("a3")
    engine.clock.advance(100.0)
    assert level(engine, "a3") == 3  # the running call does not count yet
    engine.abort("a3")
    assert attained(engine, "A").service_s == 104.0  # an aborted one does


def test_a_call_that_never_ran_was_never_served():
    engine = make_engine()
    engine.arrive("a1", [1, 2, 3], program="A")
    engine.clock.advance(50.0)
    engine.abort("a1")
    assert attained(engine, "A") is None


def test_the_longest_served_program_waits_for_the_others():
    engine = make_engine()
    call(engine, "a1", "A", runs_s=5.0)
    call(engine, "b1", "B", runs_s=1.0)
    for label in "abc":
        engine.arrive(f"{label}2", [1, 2, 3], program=label.upper())
    order = sorted(["a2", "b2", "c2"], key=engine.controller.priority)
    assert order == ["c2", "b2", "a2"]


def test_a_starved_call_is_promoted_and_its_programs_counters_start_anew():
    # Scenario:
    #   1. A was served for 3 s and waited for 2 s.
    #   2. Its next call arrives at 5 s: promoted after 4 * 3 - 2 = 10 s more.
    #   3. Promoted, it stands in the first queue, and both counters are zero.
    #   4. Of its wait only what comes after the promotion counts.
    engine = make_engine()
    call(engine, "a1", "A", waits_s=2.0, runs_s=3.0)
    engine.arrive("a2", [1, 2, 3], program="A")
    assert level(engine, "a2") == 2
    assert engine.controller.promote_at_s("a2") == 15.0
    engine.clock.set(15.0)
    engine.controller.promote("a2")
    assert level(engine, "a2") == 0
    assert engine.controller.promote_at_s("a2") == math.inf
    assert attained(engine, "A") is None
    engine.clock.advance(1.0)
    engine.admit("a2")
    assert attained(engine, "A").wait_s == 1.0
    engine.clock.advance(2.0)
    engine.finish("a2")
    assert attained(engine, "A").service_s == 2.0
    # The next call is starved after 4 * 2 - 1 s.
    engine.arrive("a3", [1, 2, 3], program="A")
    assert engine.controller.promote_at_s("a3") == engine.clock.now_s() + 7.0


def test_a_promotion_at_the_very_start_of_time_counts_from_there():
    engine = make_engine()
    engine.clock.set(-30.0)
    call(engine, "a1", "A", runs_s=3.0)
    engine.arrive("a2", [1, 2, 3], program="A")
    engine.clock.set(0.0)
    engine.controller.promote("a2")
    engine.clock.set(4.0)
    engine.admit("a2")
    assert attained(engine, "A").wait_s == 4.0


def test_a_clock_that_goes_back_takes_no_service_away():
    engine = make_engine()
    call(engine, "a1", "A", waits_s=1.0, runs_s=1.0)
    call(engine, "a2", "A", waits_s=-5.0, runs_s=-5.0)
    assert attained(engine, "A") == Attained(1.0, 1.0)
