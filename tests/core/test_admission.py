"""Admission control: what is reserved for programs under way, and what may start."""

from __future__ import annotations

import random

import pytest

from ttlcache.config import load_config
from ttlcache.programs.model import Program, Turn
from ttlcache.programs.places import Place
from ttlcache.scheduling import admission
from ttlcache.scheduling.admission import MIN_ENDED, AdmissionControl, GrowthReserve
from ttlcache.testing import FakeEngine
from ttlcache.types import GapKey, Pressure

BLOCK_TOKENS = 4


def make_program(number=1):
    return Program(("", f"P{number}"), place=Place(number))


def ended(control, *final_blocks):
    """So many programs are over, each with its last context."""
    for number, blocks in enumerate(final_blocks, 1000):
        program = make_program(number)
        control.on_turn_running(program, blocks)
        program.ended = True
        control.on_program_end(program)


def room_to_grow(share=0.5, finals=(20,) * MIN_ENDED):
    control = GrowthReserve(share, BLOCK_TOKENS)
    ended(control, *finals)
    return control


def admitted(control, program, needed, free_blocks, context_blocks=None, pool=100):
    missing = control.missing_blocks(
        program,
        needed,
        needed if context_blocks is None else context_blocks,
        Pressure(pool, free_blocks=free_blocks),
    )
    return missing <= 0


def test_room_is_kept_for_half_of_what_is_still_to_come():
    # Programs end with 20 blocks; two are at 4 and 12: (16 + 8) / 2 = 12. A newcomer
    # with 2 takes 2, and 9 for its own growth: 23.
    control = room_to_grow()
    control.on_turn_running(make_program(1), 4)
    control.on_turn_finished(make_program(2), 12)
    assert control.reserved_pool_blocks == 12.0
    assert not admitted(control, make_program(3), 2, free_blocks=22)
    assert admitted(control, make_program(3), 2, free_blocks=23)


def test_one_that_is_larger_than_most_needs_nothing_more():
    control = room_to_grow()
    control.on_turn_running(make_program(1), 50)
    assert control.reserved_pool_blocks == 0.0
    assert admitted(control, make_program(2), 30, free_blocks=30)


def test_what_it_found_cached_grows_no_more():
    # Of 12 blocks 10 are shared: 2 are needed, and (20 - 12) / 2 for its growth.
    control = room_to_grow()
    control.on_turn_running(make_program(1), 20)
    assert not admitted(control, make_program(2), 2, free_blocks=5, context_blocks=12)
    assert admitted(control, make_program(2), 2, free_blocks=6, context_blocks=12)


def test_half_of_the_pool_serves_whoever_comes():
    """Chats of one block beside agents of 999: the mean is far from either."""
    control = room_to_grow(finals=(1, 999) * MIN_ENDED)
    for number in range(40):
        control.on_turn_running(make_program(number), 1)
    assert control.reserved_pool_blocks > 9_000
    assert admitted(control, make_program(99), 1, free_blocks=501, pool=1000)
    assert not admitted(control, make_program(99), 1, free_blocks=500, pool=1000)


def test_with_several_cache_groups_a_context_takes_more_blocks():
    control = room_to_grow()
    control.on_footprint(10, 9.0)  # a part is shared: growth is not
    control.on_turn_running(make_program(1), 12)
    assert control.reserved_pool_blocks == 4.0
    control.on_footprint(10, 31.0)
    assert control.reserved_pool_blocks == 8.0


def test_before_some_have_ended_nothing_is_known():
    control = room_to_grow(finals=(20,) * (MIN_ENDED - 1))
    control.on_turn_running(make_program(1), 4)
    assert admitted(control, make_program(2), 5, free_blocks=5)


def test_who_is_alone_may_start_whatever_it_will_need():
    control = room_to_grow(finals=(1000,) * MIN_ENDED)
    assert admitted(control, make_program(1), 5, free_blocks=5)


def test_who_has_started_is_never_held_back_nor_its_sub_agents():
    control = room_to_grow()
    parent, child = make_program(1), make_program(2)
    control.on_turn_running(parent, 4)
    assert admitted(control, parent, 50, free_blocks=0)
    assert not admitted(control, child, 4, free_blocks=4)
    child.adopt(parent)
    assert admitted(control, child, 4, free_blocks=4)
    orphan = make_program(4)
    orphan.adopt(make_program(5))  # which waits itself
    assert not admitted(control, orphan, 4, free_blocks=4)
    returning = make_program(3)
    returning.turns_finished = 1  # its memory is gone
    assert admitted(control, returning, 50, free_blocks=0)


def test_who_holds_no_memory_any_more_has_no_room():
    control, program = room_to_grow(), make_program(1)
    control.on_turn_finished(program, 4)
    turn = Turn(1, 0.0, GapKey("", ()), context_tokens=16, pin_id=7)
    program.open_turns.append(turn)
    control.on_no_pin(program)  # one pin of two
    assert control.reserved_pool_blocks == 8.0
    turn.pin_id, program.live_requests = None, 1
    control.on_no_pin(program)  # its next turn waits
    assert control.reserved_pool_blocks == 8.0
    program.live_requests = 0
    control.on_no_pin(program)
    control.on_no_pin(program)
    assert control.reserved_pool_blocks == 0.0


def test_an_ended_program_is_learnt_once():
    """One of its requests was waiting when the client said so, and runs on."""
    control = GrowthReserve(1.0, BLOCK_TOKENS)
    for number in range(MIN_ENDED):
        program = make_program(number)
        control.on_turn_finished(program, 20)
        program.ended = True
        control.on_program_end(program)
        control.on_turn_running(program, 2)
        control.on_program_end(program)
    control.on_turn_running(make_program(9), 5)
    assert control.reserved_pool_blocks == 15.0


def test_what_a_forgotten_program_had_counts_too():
    control = GrowthReserve(1.0, BLOCK_TOKENS)
    for number in range(MIN_ENDED):
        program = make_program(number)
        program.open_turns.append(Turn(number, 0.0, GapKey("", ()), context_tokens=80))
        control.on_program_end(program)
    control.on_turn_running(make_program(9), 5)
    assert control.reserved_pool_blocks == 80 / BLOCK_TOKENS - 5


def test_rounding_does_not_add_up():
    control, rng = (
        room_to_grow(share=0.3, finals=(17, 23, 29, 31, 37)),
        random.Random(0),
    )
    programs = [make_program(number) for number in range(20)]
    for _ in range(5000):
        program = rng.choice(programs)
        rng.choice(
            (
                lambda: control.on_turn_running(program, rng.uniform(0, 40)),  # noqa: B023
                lambda: control.on_turn_finished(program, rng.uniform(0, 40)),  # noqa: B023
                lambda: control.on_no_pin(program),  # noqa: B023
            )
        )()
        assert control.reserved_pool_blocks >= -1e-6
    for program in programs:
        control.on_no_pin(program)
    assert control.reserved_pool_blocks == 0.0


# --- the configuration ------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({}, GrowthReserve),
        ({"ordering": "program-fcfs"}, GrowthReserve),
        ({"ordering": "expected-finish"}, GrowthReserve),
        ({"policy": "cachettl"}, AdmissionControl),
        ({"admission": "none"}, AdmissionControl),
        ({"policy": "cachettl", "admission": "room-to-grow"}, GrowthReserve),
    ],
)
def test_auto_is_for_our_own_policy_in_an_order_by_program(config, kind):
    made = admission.create(load_config(config), BLOCK_TOKENS)
    assert type(made) is kind


def test_no_control_lets_everything_start():
    control, program = AdmissionControl(), make_program()
    control.on_turn_running(program, 100)
    control.on_turn_finished(program, 100)
    control.on_footprint(100, 100)
    control.on_no_pin(program)
    control.on_program_end(program)
    assert admitted(control, make_program(2), 1000, free_blocks=0)
    assert control.reserved_pool_blocks == 0


# --- programs of a fake engine: 32 blocks of 4 tokens -----------------------------


@pytest.fixture(autouse=True)
def all_growth_is_reserved(monkeypatch):
    monkeypatch.setattr(admission, "GROWTH_SHARE", 1.0)


@pytest.fixture
def engine():
    return build(policy="fixed", policy_options={"ttl_s": 60.0})


def build(**config):
    """Five programs have ended with 10 blocks each; A has 2, D 14 and runs on."""
    settings = {
        **config,
        "max_pinned_fraction": 1.0,
        "admission": "room-to-grow",
    }
    engine = FakeEngine(settings, pool_blocks=32, block_tokens=BLOCK_TOKENS)
    for number in range(MIN_ENDED):
        label = f"over{number}"
        tokens = range(1000 * number, 1000 * number + 40)
        engine.arrive(label, tokens, program=label, is_last_step=True)
        engine.admit(label)
        engine.finish(label)
    for label, tokens in (("A", range(8)), ("D", range(500, 556))):
        engine.arrive(label, tokens, program=label)
        assert engine.admit(label)
    return engine


def may_start(engine, request_id, needed_blocks=2):
    return engine.controller.memory.may_start(request_id, needed_blocks)


def test_an_unknown_request_may_start(engine):
    assert may_start(engine, "never arrived", 1000)


def test_a_preempted_request_gets_back_in_although_its_program_ended(engine):
    engine.preempt("A")
    engine.controller.end("", "A")
    assert may_start(engine, "A", 100)
    engine.arrive("C", range(900, 908), program="C")
    assert not may_start(engine, "C", 100)


def test_a_sub_agent_starts_while_its_parent_waits_for_it(engine):
    engine.finish("A")
    engine.arrive("child", range(700, 708), program="child", parent_id="A")
    engine.arrive("C", range(900, 908), program="C")
    assert may_start(engine, "child")
    assert not may_start(engine, "C")


def test_a_request_that_never_got_memory_does_not_count(engine):
    reserved = engine.controller.admission.reserved_pool_blocks
    engine.arrive("C", range(900, 908), program="C")
    engine.abort("C")
    assert engine.controller.admission.reserved_pool_blocks == reserved


@pytest.mark.parametrize("leave", ["finish", "abort"])
def test_a_program_that_ends_under_way_leaves_nothing_behind(engine, leave):
    # Scenario: A is told to have ended while one of its requests runs and one waits,
    # which gets its memory later.
    engine.arrive("A2", range(100, 108), program="A")
    engine.controller.end("", "A")
    assert engine.controller.admission.reserved_pool_blocks == 0.0
    assert engine.admit("A2")
    for request_id in ("A", "A2"):
        getattr(engine, leave)(request_id)
    assert engine.controller.admission.reserved_pool_blocks == 0.0
    engine.check()


def test_a_newcomer_waits_until_the_pin_is_gone(engine):
    # C wants 2, and 8 are to come for it as for A: 18, and 16 are free.
    engine.arrive("C", range(900, 908), program="C")
    assert not may_start(engine, "C")
    engine.finish("A")
    assert len(engine.controller.pins) == 1
    assert not may_start(engine, "C")
    engine.step(seconds=61.0)
    assert len(engine.controller.pins) == 0
    assert may_start(engine, "C")


@pytest.mark.parametrize("leave", ["abort", "end"])
def test_a_newcomer_starts_when_the_other_is_gone(engine, leave):
    engine.arrive("C", range(900, 908), program="C")
    if leave == "abort":
        engine.abort("A")
    else:
        engine.controller.end("", "A")
        engine.finish("A")
    assert may_start(engine, "C")


def test_what_only_a_wish_keeps_gives_way_to_who_is_held_back():
    # The policy gives A nothing, its client a minute: 4 blocks, and 6 to come.
    engine = build(policy="none")
    engine.finish("A")
    assert engine.controller.admission.reserved_pool_blocks == 0.0
    engine.turn("A-1", range(16), program="A", ttl=60.0)
    (pin,) = engine.controller.pins
    assert pin.has_client_ttl
    engine.arrive("C", range(900, 908), program="C")
    assert not may_start(engine, "C")
    assert engine.controller.memory.free_for_newcomer("C", 2) == 2
    assert pin.kv_blocks == 2
    assert may_start(engine, "C")
    assert engine.controller.memory.free_for_newcomer("C", 2) == 0


def test_a_tenant_over_its_part_gives_way_to_anothers_newcomer():
    engine = build(policy="fixed", policy_options={"ttl_s": 60.0})
    engine.finish("A")
    engine.turn("A-1", range(56), program="A")  # 14 blocks, so half of the pool is less
    engine.finish("D")
    engine.arrive("C", range(900, 908), program="C")
    engine.arrive("E", range(900, 908), program="E", tenant="other")
    assert not may_start(engine, "C")
    own = engine.controller.memory.free_for_newcomer("C", 2)
    assert own == 0, "its own tenant's are before it"
    assert not may_start(engine, "E")
    assert engine.controller.memory.free_for_newcomer("E", 2) > 0
    assert may_start(engine, "E")


def test_who_turned_itself_off_holds_nobody_back(engine):
    engine.arrive("C", range(900, 908), program="C")
    assert not may_start(engine, "C")
    engine.controller.disable()
    assert may_start(engine, "C")


def test_an_id_that_is_used_again_leaves_no_room_behind(engine):
    engine.arrive("A", range(700, 708), program="other")  # whose end we never heard of
    assert engine.controller.admission.reserved_pool_blocks == 0.0
