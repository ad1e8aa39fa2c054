"""Room to grow: what is kept free for programs under way, and who may start."""

from __future__ import annotations

import random

import pytest

from ttlcache.config import load_config
from ttlcache.errors import ConfigError
from ttlcache.estimators.costs import MIN_LOST
from ttlcache.programs.model import Program, Turn
from ttlcache.programs.places import Place
from ttlcache.scheduling import admissions
from ttlcache.scheduling.admission import AdmitAll
from ttlcache.scheduling.growth import MIN_ENDED, RoomToGrow
from ttlcache.testing import FakeEngine
from ttlcache.types import Admission, GapKey, Pressure

BLOCK_TOKENS = 4


def make_program(number=1):
    return Program(("", f"P{number}"), place=Place(number))


def ended(control, *final_blocks):
    """So many programs are over, each with its last context."""
    for number, blocks in enumerate(final_blocks, 1000):
        program = make_program(number)
        control.reasons(program, blocks, now_s=0.0)
        program.ended = True
        control.leaves(program, now_s=0.0)


def room_to_grow(share=0.5, finals=(20,) * MIN_ENDED):
    control = RoomToGrow(share, BLOCK_TOKENS)
    ended(control, *finals)
    return control


def admitted(control, program, kv_blocks, free_blocks, context_blocks=None, pool=100):
    pressure = Pressure(pool, free_blocks=free_blocks)
    answer = control.admit(
        program,
        kv_blocks,
        pressure,
        0.0,
        context_blocks=kv_blocks if context_blocks is None else context_blocks,
    )
    return answer is Admission.ADMIT


def test_room_is_kept_for_half_of_what_is_still_to_come():
    # Programs end with 20 blocks; two are at 4 and 12: (16 + 8) / 2 = 12. A newcomer
    # with 2 takes 2, and 9 for its own growth: 23.
    control = room_to_grow()
    control.reasons(make_program(1), 4, now_s=0.0)
    control.acts(make_program(2), 12, now_s=0.0)
    assert control.growth_blocks == 12.0
    assert not admitted(control, make_program(3), 2, free_blocks=22)
    assert admitted(control, make_program(3), 2, free_blocks=23)


def test_one_that_is_larger_than_most_needs_nothing_more():
    control = room_to_grow()
    control.reasons(make_program(1), 50, now_s=0.0)
    assert control.growth_blocks == 0.0
    assert admitted(control, make_program(2), 30, free_blocks=30)


def test_what_it_found_cached_grows_no_more():
    # Of 12 blocks 10 are shared: 2 are needed, and (20 - 12) / 2 for its growth.
    control = room_to_grow()
    control.reasons(make_program(1), 20, now_s=0.0)
    assert not admitted(control, make_program(2), 2, free_blocks=5, context_blocks=12)
    assert admitted(control, make_program(2), 2, free_blocks=6, context_blocks=12)


def test_half_of_the_pool_serves_whoever_comes():
    """Chats of one block beside agents of 999: the mean is far from either."""
    control = room_to_grow(finals=(1, 999) * MIN_ENDED)
    for number in range(40):
        control.reasons(make_program(number), 1, now_s=0.0)
    assert control.growth_blocks > 9_000
    assert admitted(control, make_program(99), 1, free_blocks=501, pool=1000)
    assert not admitted(control, make_program(99), 1, free_blocks=500, pool=1000)


def test_with_several_cache_groups_a_context_takes_more_blocks():
    control = room_to_grow()
    control.weighs(10, 9.0)  # a part is shared: growth is not
    control.reasons(make_program(1), 12, now_s=0.0)
    assert control.growth_blocks == 4.0
    control.weighs(10, 31.0)
    assert control.growth_blocks == 8.0


def test_above_a_lower_tier_room_is_left_for_what_that_loses():
    computed = 0.25
    control = RoomToGrow(0.5, BLOCK_TOKENS, lambda: computed)
    ended(control, *(20,) * MIN_ENDED)
    control.reasons(make_program(1), 4, now_s=0.0)
    # (16 + 18) / 2 blocks are to come, and a quarter counts: 2 + 4.25.
    assert control.growth_blocks == 2.0
    assert not admitted(control, make_program(2), 2, free_blocks=6)
    assert admitted(control, make_program(2), 2, free_blocks=7)
    computed = 0.0
    assert admitted(control, make_program(2), 2, free_blocks=2)


def test_before_some_have_ended_nothing_is_known():
    control = room_to_grow(finals=(20,) * (MIN_ENDED - 1))
    control.reasons(make_program(1), 4, now_s=0.0)
    assert admitted(control, make_program(2), 5, free_blocks=5)


def test_who_is_alone_may_start_whatever_it_will_need():
    control = room_to_grow(finals=(1000,) * MIN_ENDED)
    assert admitted(control, make_program(1), 5, free_blocks=5)


def test_who_has_started_is_never_held_back_nor_its_sub_agents():
    control = room_to_grow()
    parent, child = make_program(1), make_program(2)
    control.reasons(parent, 4, now_s=0.0)
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
    control.acts(program, 4, now_s=0.0)
    turn = Turn(1, 0.0, GapKey("", ()), context_tokens=16, pin_id=7)
    program.open_turns.append(turn)
    control.lets_go(program)  # one pin of two
    assert control.growth_blocks == 8.0
    turn.pin_id, program.in_flight = None, 1
    control.lets_go(program)  # its next turn waits
    assert control.growth_blocks == 8.0
    program.in_flight = 0
    control.lets_go(program)
    control.lets_go(program)
    assert control.growth_blocks == 0.0


def test_an_ended_program_is_learnt_once():
    """One of its requests was waiting when the client said so, and runs on."""
    control = RoomToGrow(1.0, BLOCK_TOKENS)
    for number in range(MIN_ENDED):
        program = make_program(number)
        control.acts(program, 20, now_s=0.0)
        program.ended = True
        control.leaves(program, now_s=0.0)
        control.reasons(program, 2, now_s=0.0)
        control.leaves(program, now_s=0.0)
    control.reasons(make_program(9), 5, now_s=0.0)
    assert control.growth_blocks == 15.0


def test_what_a_forgotten_program_had_counts_too():
    control = RoomToGrow(1.0, BLOCK_TOKENS)
    for number in range(MIN_ENDED):
        program = make_program(number)
        program.open_turns.append(Turn(number, 0.0, GapKey("", ()), context_tokens=80))
        control.leaves(program, now_s=0.0)
    control.reasons(make_program(9), 5, now_s=0.0)
    assert control.growth_blocks == 80 / BLOCK_TOKENS - 5


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
                lambda: control.reasons(program, rng.uniform(0, 40), 0.0),  # noqa: B023
                lambda: control.acts(program, rng.uniform(0, 40), 0.0),  # noqa: B023
                lambda: control.lets_go(program),  # noqa: B023
            )
        )()
        assert control.growth_blocks >= -1e-6
    for program in programs:
        control.lets_go(program)
    assert control.growth_blocks == 0.0


# --- the configuration ------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({}, RoomToGrow),
        ({"ordering": "program-fcfs"}, RoomToGrow),
        ({"ordering": "least-work"}, AdmitAll),
        ({"policy": "cachettl"}, AdmitAll),
        ({"admission": "none"}, AdmitAll),
        ({"policy": "cachettl", "admission": "room-to-grow"}, RoomToGrow),
    ],
)
def test_auto_is_for_our_own_policy_in_an_order_by_program(config, kind):
    made = admissions.create(load_config(config), BLOCK_TOKENS, lambda: 1.0)
    assert type(made) is kind


def test_it_needs_an_order_in_which_newcomers_come_last():
    with pytest.raises(ConfigError, match="room-to-grow"):
        load_config({"admission": "room-to-grow", "ordering": "plas"})


# --- programs of a fake engine: 32 blocks of 4 tokens -----------------------------


@pytest.fixture
def engine():
    return build(policy="fixed", policy_options={"ttl_s": 60.0})


def build(**config):
    """Five programs have ended with 10 blocks each; A has 2, D 14 and runs on."""
    settings = {
        **config,
        "max_pinned_fraction": 1.0,
        "admission": "room-to-grow",
        "growth_share": 1.0,
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


def may_start(engine, request_id, kv_blocks=2):
    return engine.controller.admission(request_id, kv_blocks) is Admission.ADMIT


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


def test_a_tier_that_keeps_what_is_given_up_lets_newcomers_in(engine):
    engine.finish("A")  # pinned: of its size contexts are
    engine.arrive("C", range(900, 908), program="C")
    costs = engine.controller.costs
    assert not may_start(engine, "C")
    engine.controller.lower_tier = "cpu"
    assert may_start(engine, "C"), "it is believed before anything came back"
    costs.observe_reload("cpu", 1000, 1e-9)
    assert may_start(engine, "C")
    for _ in range(MIN_LOST):
        costs.observe_lost(100, found_below=False)
    assert not may_start(engine, "C"), "it keeps nothing"


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
    assert engine.controller.growth_blocks == 0.0
    engine.turn("A-1", range(16), program="A", ttl=60.0)
    (pin,) = engine.controller.pins
    assert pin.client_ttl
    engine.arrive("C", range(900, 908), program="C")
    assert not may_start(engine, "C")
    assert engine.controller.make_room("C", 2) == 2
    assert pin.kv_blocks == 2
    assert may_start(engine, "C")
    assert engine.controller.make_room("C", 2) == 0


def test_a_tenant_over_its_part_gives_way_to_anothers_newcomer():
    engine = build(policy="fixed", policy_options={"ttl_s": 60.0})
    engine.finish("A")
    engine.turn("A-1", range(56), program="A")  # 14 blocks, so half of the pool is less
    engine.finish("D")
    engine.arrive("C", range(900, 908), program="C")
    engine.arrive("E", range(900, 908), program="E", tenant="other")
    assert not may_start(engine, "C")
    assert engine.controller.make_room("C", 2) == 0, "its own tenant's are before it"
    assert not may_start(engine, "E")
    assert engine.controller.make_room("E", 2) > 0
    assert may_start(engine, "E")


def test_who_turned_itself_off_holds_nobody_back(engine):
    engine.arrive("C", range(900, 908), program="C")
    assert not may_start(engine, "C")
    engine.controller.disable()
    assert may_start(engine, "C")


def test_an_id_that_is_used_again_leaves_no_room_behind(engine):
    engine.arrive("A", range(700, 708), program="other")  # whose end we never heard of
    assert engine.controller.growth_blocks == 0.0


def test_under_another_order_nobody_is_held_back(engine):
    engine.arrive("C", range(900, 908), program="C")
    answer = engine.controller.admission("C", 2, by_program=False)
    assert answer is Admission.ADMIT
