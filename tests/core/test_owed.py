"""Room is left for what a program lost to memory pressure."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ttlcache.events import Admission, Urgency
from ttlcache.owed import RoomOwed
from ttlcache.testing import FakeEngine
from ttlcache.types import PinOutcome

POOL = 40


def make_engine(**config):
    defaults = {
        "policy": "adaptive",
        "policy_options": {"room_owed": True},
        "max_pinned_fraction": 1.0,
    }
    return FakeEngine({**defaults, **config}, pool_blocks=POOL, block_tokens=1)


def loser(engine, label="A", blocks=20, tenant=""):
    """A program with a pin."""
    prompt = [1000 * ord(label) + i for i in range(blocks)]
    return engine.turn(f"{label}-0", prompt, [7], program=label, tenant=tenant)


def press(engine, blocks=20):
    """A program under way that was there first, and grows by taking a pin."""
    assert engine.controller.reclaim(blocks, Urgency.RUNNING, "old") > 0


def start_old(engine):
    engine.arrive("old", [1, 2, 3], program="old")
    assert engine.admit("old")


def pressed(**config):
    """An engine in which program A has lost its pin to one that grows."""
    engine = make_engine(**config)
    start_old(engine)
    loser(engine)
    press(engine)
    return engine


def newcomer_fits(engine, blocks=18, **identity):
    engine.arrive("new", range(50_000, 50_000 + blocks), program="N", **identity)
    return engine.admit("new")


def test_a_newcomer_leaves_room_for_who_lost_its_pin():
    engine = make_engine()
    start_old(engine)
    context = loser(engine)
    press(engine)
    assert engine.controller.owed.blocks(engine.clock.now_s()) == 20
    assert not newcomer_fits(engine), "37 are free: 20 are owed, 18 are asked for"
    engine.arrive("A-1", [*context, 9], program="A")
    assert engine.admit("A-1"), "the room is there"
    assert engine.controller.owed.blocks(engine.clock.now_s()) == 0
    engine.finish("A-1")
    engine.check()


def test_what_fits_beside_is_admitted():
    engine = pressed()
    assert newcomer_fits(engine, blocks=17)


def test_without_it_newcomers_take_what_is_free():
    engine = pressed(policy_options={"room_owed": False})
    assert newcomer_fits(engine)


def test_debts_lapse():
    engine = pressed(max_ttl_s=60.0)
    engine.clock.advance(59.9)
    assert not newcomer_fits(engine)
    engine.clock.advance(0.1)
    assert engine.admit("new")
    assert engine.controller.owed.blocks(engine.clock.now_s()) == 0


def test_nothing_is_owed_to_who_is_gone():
    engine = pressed()
    assert engine.controller.end("", "A")
    assert newcomer_fits(engine)


def test_nothing_is_owed_to_a_program_that_was_over_when_it_lost():
    engine = make_engine()
    start_old(engine)
    context = loser(engine)
    engine.arrive("A-1", [*context, 9], program="A")  # it may still claim
    engine.controller.end("", "A")
    press(engine)
    assert engine.controller.owed.blocks(engine.clock.now_s()) == 0


def test_a_reset_leaves_nothing_to_come_back_to():
    engine = pressed()
    engine.controller.release_all()
    assert engine.controller.owed.blocks(engine.clock.now_s()) == 0
    assert newcomer_fits(engine)


def test_programs_before_the_loser_are_not_held_back():
    engine = make_engine()
    context = [*engine.turn("early-0", [901, 902, 903], [7], program="early")]
    [pin] = engine.controller.pins
    engine.controller._turns.end_pin(pin, PinOutcome.EXPIRED)
    start_old(engine)
    loser(engine)
    press(engine)
    engine.arrive("early-1", [*context, *range(50_000, 50_018)], program="early")
    assert engine.admit("early-1")


def test_another_tenant_is_not_held_back():
    engine = pressed()
    assert newcomer_fits(engine, tenant="other")


def test_who_claims_its_pin_is_not_held_back():
    """It stands before the loser in the queue, which would wait behind it."""
    engine = pressed()
    context = loser(engine, "B", blocks=5)
    engine.arrive("B-1", [*context, *range(60_000, 60_020)], program="B")
    assert engine.controller.owed.blocks(engine.clock.now_s()) == 20
    assert engine.admit("B-1")


def test_an_engine_with_nothing_to_run_lets_anybody_in():
    engine = pressed()
    assert not newcomer_fits(engine)
    engine.abort("old")
    assert engine.admit("new")


@pytest.mark.parametrize("ordering", ["request-fcfs", "plas", "least-work"])
def test_only_where_the_queue_stands_by_program(ordering):
    """Elsewhere the loser might stand behind the one who waits for it."""
    engine = pressed(ordering=ordering)
    assert newcomer_fits(engine)


def test_not_in_a_queue_of_somebody_else():
    engine = pressed()
    assert not newcomer_fits(engine)
    ask = engine.controller.admission
    assert ask("new", 18) is Admission.WAIT
    assert ask("new", 18, by_program=False) is Admission.ADMIT


# --- the ledger against a plain list -------------------------------------------

_EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["lost", "settle", "pass"]),
        st.integers(0, 9),  # program
        st.integers(1, 30),  # blocks, or seconds that pass
        st.sampled_from([5.0, 50.0]),  # owed_s
    ),
    max_size=300,
)


@given(_EVENTS, st.integers(0, 11), st.integers(-20, 200))
def test_the_ledger_is_what_a_plain_list_says(events, rank, spare):
    programs = [_Program("b" if number % 3 else "") for number in range(10)]
    owed, plain, now_s = RoomOwed(), {}, 0.0
    for what, number, amount, owed_s in events:
        program = programs[number]
        if what == "pass":
            now_s += amount
        elif what == "settle":
            owed.settle(program)
            plain.pop(number, None)
        else:
            pin = SimpleNamespace(program=program, rank=(number,), owed_s=owed_s)
            owed.lost(pin, amount, now_s)
            before, until_s = plain.get(number, (0, 0.0))
            kept = before if now_s < until_s else 0
            plain[number] = (kept + amount, now_s + owed_s)
    live = {n: blocks for n, (blocks, until_s) in plain.items() if now_s < until_s}
    assert owed.blocks(now_s) == sum(live.values())
    asker = _Program("b")
    before = sum(n for number, n in live.items() if number < rank and number % 3)
    fits = owed.leaves_room(asker, (rank,), spare, now_s)
    assert fits == (spare < 0 or before <= spare)


class _Program:
    ended = False

    def __init__(self, tenant: str) -> None:
        self.tenant = tenant


def test_lapsed_debts_do_not_pile_up():
    owed = RoomOwed()
    for number in range(10_000):
        pin = SimpleNamespace(program=_Program(""), rank=(number,), owed_s=1.0)
        owed.lost(pin, 5, now_s=float(number))
    assert len(owed) <= 130
