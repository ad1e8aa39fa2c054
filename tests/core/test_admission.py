"""Admission control: what is reserved for programs under way, and what may start."""

import pytest

from tests.core.stories import make_engine, make_program
from ttlcache.programs.model import Turn
from ttlcache.scheduling import admission
from ttlcache.scheduling.admission import MIN_ENDED, GrowthReserve
from ttlcache.types import GapKey, Pressure

BLOCK_TOKENS = 4
FINALS = (20,) * MIN_ENDED


def make_turn(number=1, **more):
    return Turn(number, 0.0, GapKey(""), **more)


def room_to_grow(share=0.5, finals=FINALS):
    """So many programs are over, each with its last context."""
    control = GrowthReserve(share, BLOCK_TOKENS)
    for number, blocks in enumerate(finals, 1000):
        program = make_program(number)
        control.on_context(program, blocks)
        program.ended = True
        control.on_program_end(program)
    return control


def admitted(control, program, needed, free_blocks):
    pressure = Pressure(100, free_blocks=free_blocks)
    return control.missing_blocks(program, needed, needed, pressure) <= 0


@pytest.mark.parametrize(
    ("finals", "running", "needed", "context_blocks", "free", "missing"),
    [
        # Programs end with 20 blocks; two are at 4 and 12: (16 + 8) / 2 = 12. A
        # newcomer with 2 takes 2, and 9 for its own growth: 23.
        (FINALS, [4, 12], 2, 2, 22, 1.0),
        # One that is larger than most needs nothing more.
        (FINALS, [50], 30, 30, 30, 0.0),
        # Of 12 blocks 10 are shared: 2 are needed, and (20 - 12) / 2 for its growth.
        (FINALS, [20], 2, 12, 5, 1.0),
        # Chats of one block beside agents of 999, and the mean is far from either:
        # half of the pool serves whoever comes.
        ((1, 999) * MIN_ENDED, [1] * 40, 1, 1, 50, 1.0),
        # Before some have ended nothing is known.
        (FINALS[1:], [4], 5, 5, 0, 0.0),
        # Who is alone may start whatever it will need.
        ((1000,) * MIN_ENDED, [], 5, 5, 0, 0.0),
    ],
)
def test_room_is_kept_for_half_of_what_is_still_to_come(
    finals, running, needed, context_blocks, free, missing
):
    control = room_to_grow(finals=finals)
    for number, blocks in enumerate(running):
        control.on_context(make_program(number), blocks)
    newcomer, pressure = make_program(99), Pressure(100, free_blocks=free)
    found = control.missing_blocks(newcomer, needed, context_blocks, pressure)
    assert found == missing


def test_what_new_programs_find_cached_is_not_reserved():
    control = room_to_grow()
    for found in (0, 10):  # a quarter of a final context in the mean
        control.on_program_start(found)
    control.on_context(make_program(1), 4)
    assert control.reserved_pool_blocks == 0.75 * 8.0


def test_with_several_cache_groups_a_context_takes_more_or_larger_blocks():
    control = room_to_grow()
    control.on_pool_blocks(10, 5)  # large ones
    control.on_context(make_program(1), 12)
    assert control.reserved_pool_blocks == 2.0
    control.on_pool_blocks(10, 35)
    assert control.reserved_pool_blocks == pytest.approx(8.0, rel=0.001)


def test_who_has_started_is_never_held_back_nor_its_sub_agents():
    control = room_to_grow()
    parent, child = make_program(1), make_program(2)
    control.on_context(parent, 4)
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
    control.on_context(program, 4)
    turn = make_turn(pin_id=7, context_tokens=16)
    program.awaited_turns.append(turn)
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
        control.on_context(program, 20)
        program.ended = True
        control.on_program_end(program)
        control.on_context(program, 2)
        control.on_program_end(program)
    control.on_context(make_program(9), 5)
    assert control.reserved_pool_blocks == 15.0


def test_what_a_forgotten_program_had_counts_too():
    control = GrowthReserve(1.0, BLOCK_TOKENS)
    for number in range(MIN_ENDED):
        program = make_program(number)
        program.awaited_turns.append(make_turn(number, context_tokens=80))
        control.on_program_end(program)
    control.on_context(make_program(9), 5)
    assert control.reserved_pool_blocks == 80 / BLOCK_TOKENS - 5


# --- programs of a fake engine: 32 blocks of 4 tokens -----------------------------


@pytest.fixture(autouse=True)
def all_growth_is_reserved(monkeypatch):
    monkeypatch.setattr(admission, "GROWTH_SHARE", 1.0)


@pytest.fixture
def engine():
    return build()


def build(**config):
    """Five programs have ended with 10 blocks each; A has 2, D 14 and runs on."""
    config |= {"max_pinned_fraction": 1.0, "admission": "room-to-grow"}
    engine = make_engine(60.0, pool_blocks=32, block_tokens=BLOCK_TOKENS, **config)
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


def newcomer(engine, label="C", **more):
    engine.arrive(label, range(900, 908), program=label, **more)


def may_start(engine, request_id, needed_blocks=2):
    return engine.controller.memory.may_start(request_id, needed_blocks)


def reserved(engine):
    return engine.controller.admission.reserved_pool_blocks


@pytest.mark.parametrize(("needed", "fits"), [(2, True), (100, False)])
def test_what_does_not_fit_was_not_held_back_for_growth(engine, needed, fits):
    newcomer(engine)
    memory, record = engine.controller.memory, engine.controller.requests["C"]
    memory.free_for_newcomer("C", needed)
    assert record.refused_for_growth is fits
    memory.on_lack_of_memory("C")
    assert not record.refused_for_growth, "the last refusal counts"


def test_an_unknown_request_may_start(engine):
    assert may_start(engine, "never arrived", 1000)


def test_a_preempted_request_gets_back_in_although_its_program_ended(engine):
    engine.preempt("A")
    engine.end("A")
    assert may_start(engine, "A", 100)
    newcomer(engine)
    assert not may_start(engine, "C", 100)


def test_a_sub_agent_starts_while_its_parent_waits_for_it(engine):
    engine.finish("A")
    newcomer(engine, "child", parent_id="A")
    newcomer(engine)
    assert may_start(engine, "child")
    assert not may_start(engine, "C")


@pytest.mark.parametrize("leave", ["finish", "abort"])
def test_a_program_that_ends_under_way_leaves_nothing_behind(engine, leave):
    # Scenario: A is told to have ended while one of its requests runs and one waits,
    # which gets its memory later.
    engine.arrive("A2", range(100, 108), program="A")
    engine.end("A")
    assert reserved(engine) == 0.0
    assert engine.admit("A2")
    for request_id in ("A", "A2"):
        getattr(engine, leave)(request_id)
    assert reserved(engine) == 0.0


@pytest.mark.parametrize("leave", ["abort", "end", "disable"])
def test_a_newcomer_starts_when_the_other_is_gone(engine, leave):
    newcomer(engine)
    assert not may_start(engine, "C")
    if leave == "abort":
        engine.abort("A")
    elif leave == "end":
        engine.end("A")
        engine.finish("A")
    else:
        engine.controller.disable()
    assert may_start(engine, "C")


def test_what_only_a_wish_keeps_gives_way_to_who_is_held_back():
    # The policy gives A nothing, its client a minute: 4 blocks, and 6 to come.
    engine = build(policy="none")
    engine.finish("A")
    assert reserved(engine) == 0.0
    engine.turn("A-1", range(16), program="A", ttl=60.0)
    (pin,) = engine.pins()
    assert pin.has_client_ttl
    newcomer(engine)
    assert not may_start(engine, "C")
    assert engine.controller.memory.free_for_newcomer("C", 2) == 2
    assert pin.kv_blocks == 2
    assert may_start(engine, "C")
    assert engine.controller.memory.free_for_newcomer("C", 2) == 0


def test_above_a_tier_no_more_pins_end_than_the_newcomer_lacks(monkeypatch):
    # A pin that ends stays referenced until it is copied: nothing is freed.
    engine, ended = build(policy="none"), []
    for name in "AD":
        engine.finish(name)
        engine.turn(f"{name}-1", range(20), program=name, ttl=60.0)
    monkeypatch.setattr(holder := engine.holder, "shrink", lambda *_: None)
    monkeypatch.setattr(holder, "release", lambda *pin: ended.append(pin) or 0)
    monkeypatch.setattr(holder, "pressure", lambda: Pressure(32, 5 * len(ended)))
    newcomer(engine)
    memory, program = engine.controller.memory, engine.controller.requests["C"].program
    memory.reclaimer.take_for_newcomer(program, 3)
    assert len(ended) == 1
    memory.reclaimer.take_for_newcomer(program, 10)
    assert len(ended) == 2, "all there are"


def test_without_admission_control_who_started_is_no_newcomer():
    engine = make_engine(60.0)
    for request_id in ("a1", "a2", "a3"):
        engine.arrive(request_id, range(8), program="A")
    is_newcomer = engine.controller.memory.is_newcomer
    assert is_newcomer("a2")
    for request_id, rekeyed in (("a1", ["a2", "a3"]), ("a2", [])):
        engine.rekeyed.clear()
        assert engine.admit(request_id)
        assert engine.rekeyed == rekeyed
    assert not is_newcomer("a3")


def test_a_tenant_over_its_part_gives_way_to_anothers_newcomer(engine):
    engine.finish("A")
    engine.turn("A-1", range(56), program="A")  # 14 blocks, so half of the pool is less
    engine.finish("D")
    newcomer(engine)
    newcomer(engine, "E", tenant="other")
    assert not may_start(engine, "C")
    own = engine.controller.memory.free_for_newcomer("C", 2)
    assert own == 0, "its own tenant's are before it"
    assert not may_start(engine, "E")
    assert engine.controller.memory.free_for_newcomer("E", 2) > 0
    assert may_start(engine, "E")


def test_the_retry_of_an_aborted_start_teaches_nothing(engine, monkeypatch):
    engine.abort("D")
    control, found = engine.controller.admission, []
    monkeypatch.setattr(control, "on_program_start", found.append)
    for request_id in ("C", "C again"):
        engine.arrive(request_id, range(900, 908), program="C")
        assert engine.admit(request_id)
        engine.abort(request_id)
    assert found == [0.0]


def test_an_id_that_is_used_again_leaves_no_room_behind(engine):
    engine.holder.drop(engine.requests["A"].blocks)  # whose end we never heard of
    engine.arrive("A", range(700, 708), program="other")
    assert reserved(engine) == 0.0
