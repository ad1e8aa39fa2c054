"""Admission on program memory: the decayed sum, and stories of who may start."""

from __future__ import annotations

import random
from math import fsum

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ttlcache.config import load_config
from ttlcache.programs.model import Program
from ttlcache.programs.places import Place
from ttlcache.scheduling import admissions
from ttlcache.scheduling.admission import AdmitAll, WorkingSet
from ttlcache.testing import FakeEngine
from ttlcache.types import Admission, Pressure

HALF_LIFE_S = 5.0


def make_program(number=1):
    return Program(("", f"P{number}"), place=Place(number))


def admitted(control, program, kv_blocks, pool_blocks, now_s=0.0):
    answer = control.admit(
        program, kv_blocks, Pressure(pool_blocks), now_s, context_blocks=kv_blocks
    )
    return answer is Admission.ADMIT


# --- the sum -------------------------------------------------------------------


def test_reasoning_counts_whole_and_acting_halves_with_time():
    # 8 blocks reason; 16 act since second 10: 16, 8 at 15, 4 at 20, 2 at 25.
    control = WorkingSet(HALF_LIFE_S)
    control.reasons(make_program(1), 8, now_s=0.0)
    control.acts(make_program(2), 16, now_s=10.0)
    loads = [control.load_blocks(now_s) for now_s in (10.0, 15.0, 20.0, 25.0)]
    assert loads == pytest.approx([24.0, 16.0, 12.0, 10.0])


def test_a_program_counts_once_whatever_it_does():
    control, program = WorkingSet(HALF_LIFE_S), make_program()
    control.reasons(make_program(2), 100, now_s=0.0)  # somebody else, all the time
    control.reasons(program, 4, now_s=0.0)
    control.reasons(program, 6, now_s=1.0)  # its context grew
    assert control.load_blocks(1.0) == 106.0
    control.acts(program, 7, now_s=2.0)
    assert control.load_blocks(2.0) == 107.0
    control.reasons(program, 9, now_s=7.0)  # its tool took a half-life
    assert control.load_blocks(7.0) == pytest.approx(109.0)
    control.leaves(program, now_s=8.0)
    control.leaves(program, now_s=8.0)
    assert control.load_blocks(8.0) == pytest.approx(100.0)


def test_the_last_one_to_leave_takes_all_rounding_along():
    control, program = WorkingSet(HALF_LIFE_S), make_program()
    control.acts(program, 0.1, now_s=0.3)
    for tenth in range(4, 50):
        control.load_blocks(tenth / 10)
    control.leaves(program, now_s=5.0)
    assert control.load_blocks(5.0) == 0.0


def test_a_new_program_waits_until_it_fits_beside_the_others():
    control, new = WorkingSet(HALF_LIFE_S), make_program(3)
    control.reasons(make_program(1), 8, now_s=0.0)
    control.acts(make_program(2), 4, now_s=0.0)
    assert admitted(control, new, 4, 16)  # exactly
    assert not admitted(control, new, 5, 16)
    assert not admitted(control, new, 6, 16, now_s=4.9)
    assert admitted(control, new, 6, 16, now_s=5.0)  # 8 + 4 / 2 + 6


def test_a_started_program_is_never_held_back():
    control, reasoning, acting = (
        WorkingSet(HALF_LIFE_S),
        make_program(1),
        make_program(2),
    )
    control.reasons(reasoning, 100, now_s=0.0)
    control.acts(acting, 100, now_s=0.0)
    assert admitted(control, reasoning, 1000, 16)
    assert admitted(control, acting, 1000, 16)
    assert not admitted(control, make_program(3), 1, 16)


def test_the_sub_agent_of_a_started_program_is_not_held_back():
    # Its parent could not finish without it.
    control, parent, child = WorkingSet(HALF_LIFE_S), make_program(1), make_program(2)
    child.adopt(parent)
    control.reasons(make_program(3), 16, now_s=0.0)
    assert not admitted(control, child, 4, 16)
    control.acts(parent, 8, now_s=0.0)
    assert admitted(control, child, 4, 16)


def test_no_control_admits_everything():
    control = admissions.create(
        load_config({"admission": "none"}), block_tokens=16, computed_share=lambda: 1.0
    )
    program = make_program()
    assert isinstance(control, AdmitAll)
    control.reasons(program, 100, now_s=0.0)
    control.acts(program, 100, now_s=0.0)
    control.leaves(program, now_s=0.0)
    assert admitted(control, make_program(2), 1000, 16)


class Recomputed:
    """The same sum from its definition, over all programs, each time."""

    def __init__(self):
        self.shares = {}  # program: (blocks, acting since, None while reasoning)
        self.now_s = 0.0

    def load_blocks(self):
        return fsum(
            blocks
            if since_s is None
            else blocks * 2.0 ** (-(self.now_s - since_s) / HALF_LIFE_S)
            for blocks, since_s in self.shares.values()
        )


def drive(control, model, programs, event, which, blocks, elapsed_s):
    """One event in both; the model's clock never goes back."""
    now_s = control._as_of_s + elapsed_s
    model.now_s = max(model.now_s, now_s)
    program = programs[which]
    if event == "reasons":
        control.reasons(program, blocks, now_s)
        model.shares[program] = (blocks, None)
    elif event == "acts":
        control.acts(program, blocks, now_s)
        model.shares[program] = (blocks, model.now_s)
    else:
        control.leaves(program, now_s)
        model.shares.pop(program, None)


EVENTS = st.tuples(
    st.sampled_from(["reasons", "acts", "acts", "leaves"]),
    st.integers(0, 4),
    st.integers(0, 50) | st.floats(0.0, 1e6),
    st.sampled_from([0.0, 0.25, 1.0, 5.0, 40.0, 1e4, -3.0, -1e3]),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(EVENTS, max_size=60))
def test_the_sum_equals_its_definition(events):
    control, model = WorkingSet(HALF_LIFE_S), Recomputed()
    programs = [make_program(number) for number in range(5)]
    largest = 1.0
    for event in events:
        drive(control, model, programs, *event)
        largest = max(largest, event[2])
        load = control.load_blocks(model.now_s)
        assert load == pytest.approx(model.load_blocks(), abs=1e-12 * largest)
        for program in programs:
            if program in model.shares:
                assert admitted(control, program, 1e9, 1, now_s=model.now_s)


def test_the_sum_does_not_drift_over_100k_events():
    rng = random.Random(7)
    control, model = WorkingSet(HALF_LIFE_S), Recomputed()
    programs = [make_program(number) for number in range(50)]
    for number in range(100_000):
        event = rng.choice(["reasons", "acts", "acts", "leaves"])
        blocks, elapsed_s = rng.uniform(1.0, 500.0), rng.expovariate(20.0)
        drive(control, model, programs, event, rng.randrange(50), blocks, elapsed_s)
        if number % 5000 == 0:
            load = control.load_blocks(model.now_s)
            assert load == pytest.approx(model.load_blocks(), abs=1e-6)
    load = control.load_blocks(model.now_s)
    assert load == pytest.approx(model.load_blocks(), abs=1e-6)
    for program in programs:
        control.leaves(program, model.now_s)
    assert control.load_blocks(model.now_s) == 0.0


# --- programs of a fake engine: 16 blocks of 4 tokens --------------------------

EIGHT_BLOCKS = range(100, 132)


def make_engine(**config):
    settings = {"policy": "none", "ordering": "ttl-aware", **config}
    settings.setdefault("admission", "working-set")
    return FakeEngine(settings, pool_blocks=16, block_tokens=4)


def fill(engine):
    """Programs A and B reason with 8 blocks each; C arrives and needs 4."""
    for label in "AB":
        engine.arrive(label, EIGHT_BLOCKS, program=label)
        assert may_start(engine, label, 8)
        assert engine.admit(label)
    engine.arrive("C", range(16), program="C")


def may_start(engine, request_id, kv_blocks=4):
    return engine.controller.admission(request_id, kv_blocks) is Admission.ADMIT


def test_two_programs_that_reason_keep_a_third_out():
    engine = make_engine()
    fill(engine)
    engine.clock.advance(1000.0)  # time alone does not help
    assert not may_start(engine, "C")
    assert may_start(engine, "nobody")  # never arrived here: not ours to judge
    assert may_start(engine, "A")


def test_without_admission_control_the_pool_alone_decides():
    engine = make_engine(admission="none")
    fill(engine)
    assert may_start(engine, "C")


def test_programs_that_act_make_room_with_time():
    # A and B act with 8 blocks each: 16, after 5 s 8, and C's 4 fit beside them
    # once 16 / 2^(t / 5) <= 12: t = 2.08.
    engine = make_engine(admission_half_life_s=5.0)
    fill(engine)
    engine.finish("A")
    engine.finish("B")
    engine.clock.advance(2.0)
    assert not may_start(engine, "C")
    engine.clock.advance(0.1)
    assert may_start(engine, "C")


@pytest.mark.parametrize("how", ["last_step", "told", "idle"])
def test_a_program_that_ends_makes_room(how):
    engine = make_engine(program_idle_s=60.0, admission_half_life_s=1e6)
    engine.arrive("A", EIGHT_BLOCKS, program="A", is_last_step=how == "last_step")
    engine.admit("A")
    engine.arrive("B", EIGHT_BLOCKS, program="B")
    engine.admit("B")
    engine.clock.advance(59.0)
    engine.arrive("C", range(16), program="C")
    assert not may_start(engine, "C")
    engine.finish("A")
    if how == "told":
        engine.controller.end("", "A")
    if how == "idle":
        assert not may_start(engine, "C")
        engine.step(seconds=61.0)
    assert may_start(engine, "C")


def test_a_request_that_never_got_memory_does_not_count():
    engine = make_engine()
    engine.arrive("A", EIGHT_BLOCKS, program="A")
    engine.arrive("B", EIGHT_BLOCKS, program="B")
    engine.abort("B")
    engine.arrive("C", range(16), program="C")
    assert may_start(engine, "C", 16)


def test_an_aborted_request_leaves_its_program_acting():
    engine = make_engine()
    fill(engine)
    engine.abort("A")
    engine.abort("B")
    assert not may_start(engine, "C")
    engine.clock.advance(5.0)
    assert may_start(engine, "C")


def test_a_request_given_up_while_it_waits_leaves_its_program_acting():
    engine = make_engine(admission_half_life_s=1e6)
    fill(engine)
    for label in "AB":
        engine.finish(label)
        engine.arrive(f"{label}2", EIGHT_BLOCKS, program=label)
        engine.abort(f"{label}2")
    assert not may_start(engine, "C")


@pytest.mark.parametrize("leave", ["finish", "abort"])
def test_a_program_that_ends_under_way_leaves_nothing_behind(leave):
    # Scenario: A is told to have ended while one of its requests runs and one
    # waits, which is admitted later. When both are gone, nothing of A counts.
    engine = make_engine()
    engine.arrive("A", EIGHT_BLOCKS, program="A")
    engine.admit("A")
    engine.arrive("A2", range(16), program="A")
    engine.controller.end("", "A")
    assert engine.admit("A2")
    for request_id in ("A", "A2"):
        getattr(engine, leave)(request_id)
    assert engine.controller._admission.load_blocks(engine.clock.now_s()) == 0.0
    engine.arrive("C", range(16), program="C")
    assert may_start(engine, "C", 16)
    engine.check()


def test_a_preempted_request_gets_back_in_although_its_program_ended():
    engine = make_engine()
    fill(engine)
    engine.preempt("A")
    engine.controller.end("", "A")
    assert may_start(engine, "A", 100)
    assert not may_start(engine, "C", 100)


def test_a_sub_agent_starts_while_its_parent_waits_for_it():
    engine = make_engine(admission_half_life_s=1e6)
    fill(engine)
    engine.finish("A")
    engine.arrive("child", range(16), program="child", parent_id="A")
    assert may_start(engine, "child")
    assert not may_start(engine, "C")
