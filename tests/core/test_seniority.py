"""Places in the program order: how they are used up, shared and taken back."""

from __future__ import annotations

import pytest

from ttlcache.events import Urgency
from ttlcache.gauges import gauges_of
from ttlcache.seniority import MIN_ENDED, Quantum, Seniority
from ttlcache.testing import FakeEngine

QUANTUM_S = 10.0


def make_engine(**config):
    return FakeEngine(
        {
            "policy": "fixed",
            "policy_options": {"ttl_s": 1000.0},
            "ordering": "ttl-aware",
            "max_ttl_s": 1000.0,
            "max_pinned_fraction": 1.0,
            "seniority_quantum_s": QUANTUM_S,
            **config,
        },
        pool_blocks=64,
        block_tokens=1,
    )


def serve(engine, request_id, program, seconds, prompt=None, **hints):
    """A turn of `program` that runs for `seconds`; its context."""
    tokens = prompt or [1000 * ord(program[0]), 1, 2]
    engine.arrive(request_id, tokens, program=program, **hints)
    assert engine.admit(request_id)
    engine.clock.advance(seconds)
    assert engine.decode(request_id, [7])
    engine.finish(request_id)
    return [*tokens, 7]


def order(engine, *request_ids):
    return sorted(request_ids, key=engine.controller.priority)


def place(engine, program):
    return engine.controller.programs.get(("", program)).seniority


def pinned(engine):
    return {p.program.program_id: p.kv_blocks for p in engine.controller.pins}


def test_a_quantum_is_used_up_once_and_begins_anew_with_an_admission():
    mine = Seniority(1)
    assert not mine.charge(6.0, QUANTUM_S)
    assert mine.charge(6.0, QUANTUM_S)
    mine.requeue(5)
    assert not mine.charge(60.0, QUANTUM_S)  # ran on, has lost its place already
    mine.on_admission()
    assert (mine.seq, mine.is_spent) == (5, False)
    assert not mine.charge(9.0, QUANTUM_S)
    mine.on_admission()  # only what was used up begins anew
    assert mine.charge(1.0, QUANTUM_S)
    assert mine.served_s == 82.0


@pytest.mark.parametrize(
    ("served_s", "services", "expected_s"),
    [
        (20.0, 2.0, 40.0),  # most programs need more than the least
        (2.0, 2.0, QUANTUM_S),
        (90.0, 2.0, 100.0),  # waits stay bounded
        (20.0, 0.0, QUANTUM_S),
    ],
)
def test_a_quantum_is_as_long_as_programs_need(served_s, services, expected_s):
    quantum = Quantum(QUANTUM_S, services, most_s=100.0)
    for _ in range(MIN_ENDED - 1):
        quantum.ended(Seniority(1, served_s=served_s))
    assert quantum.seconds == QUANTUM_S  # too few
    quantum.ended(Seniority(1))  # never served: says nothing
    assert quantum.seconds == QUANTUM_S
    quantum.ended(Seniority(1, served_s=served_s))
    assert quantum.seconds == expected_s


def test_a_least_quantum_beyond_the_bound_stands():
    quantum = Quantum(500.0, 2.0, most_s=100.0)
    for _ in range(MIN_ENDED):
        quantum.ended(Seniority(1, served_s=1000.0))
    assert quantum.seconds == 500.0


def test_one_family_of_endless_service_does_not_make_the_quantum():
    """A hundred requests at once for an hour are 360,000 s of it."""
    quantum = Quantum(QUANTUM_S, 3.0, most_s=100.0)
    for _ in range(99):
        quantum.ended(Seniority(1, served_s=4.0))
    quantum.ended(Seniority(1, served_s=360_000.0))
    assert quantum.seconds == pytest.approx(3 * (99 * 4.0 + 100.0) / 100)


def test_a_place_lasts_where_all_programs_take_long():
    """Else a quantum below what most need takes their place from everybody."""
    engine = make_engine()
    for n in range(MIN_ENDED):
        serve(engine, f"e{n}", f"E{n}", 2 * QUANTUM_S, is_last_step=True)
    used_up = engine.controller.metrics.totals["quanta_used_up", ""]
    context = serve(engine, "a1", "A", 5 * QUANTUM_S)
    assert not place(engine, "A").is_spent
    engine.arrive("b1", [5, 6], program="B")
    engine.arrive("a2", context, program="A")
    assert order(engine, "b1", "a2") == ["a2", "b1"]
    assert engine.controller.metrics.totals["quanta_used_up", ""] == used_up
    serve(engine, "c1", "C", 6 * QUANTUM_S)
    assert place(engine, "C").is_spent  # much longer than the rest


def test_the_quantum_can_be_watched():
    engine = FakeEngine({"seniority_quantum_s": 7.0, "seniority_services": 3.0})

    def told_s():
        gauges = gauges_of(engine.controller, engine.clock.now_s())
        return gauges["seniority_quantum_seconds"]

    assert told_s() == 7.0
    for number in range(MIN_ENDED):
        quantum = engine.controller.places.quantum
        quantum.ended(Seniority(seq=number, served_s=20.0))
    assert told_s() == 60.0


def test_a_family_counts_once_with_all_that_it_was_served():
    engine = make_engine()
    for n in range(MIN_ENDED):
        serve(engine, f"p{n}", f"P{n}", 8.0)
        for child in "xyz":
            name = f"{child}{n}"
            hints = {"parent_id": f"P{n}", "is_last_step": True}
            serve(engine, name, name, 4.0, **hints)
        engine.controller.end("", f"P{n}")
    context = serve(engine, "a1", "A", 59.0)  # three families of 20 s
    assert not place(engine, "A").is_spent
    serve(engine, "a2", "A", 1.0, prompt=context)
    assert place(engine, "A").is_spent


@pytest.mark.parametrize("ordering", ["ttl-aware", "program-fcfs"])
def test_a_used_up_program_stands_behind_who_came_meanwhile(ordering):
    engine = make_engine(ordering=ordering)
    context = serve(engine, "a1", "A", 6.0)
    engine.arrive("b1", [5, 6], program="B")
    engine.arrive("a2", context, program="A")
    assert order(engine, "b1", "a2") == ["a2", "b1"]
    engine.admit("a2")
    engine.clock.advance(4.0)
    engine.decode("a2", [7])
    engine.finish("a2")
    engine.arrive("a3", [*context, 7], program="A")
    engine.arrive("c1", [8, 9], program="C")
    assert order(engine, "a3", "b1", "c1") == ["b1", "a3", "c1"]
    assert engine.controller.metrics.totals["quanta_used_up", ""] == 1
    engine.check()


def test_the_claim_counts_again_after_the_next_admission():
    engine = make_engine()
    context = serve(engine, "a1", "A", QUANTUM_S)
    engine.arrive("a2", context, program="A")
    engine.arrive("b1", [5, 6], program="B")
    assert order(engine, "b1", "a2") == ["a2", "b1"]  # came first; no class of its own
    assert engine.controller.priority("a2")[2] == engine.controller.priority("b1")[2]
    engine.admit("a2")
    engine.clock.advance(1.0)
    engine.decode("a2", [7])
    engine.finish("a2")
    engine.arrive("a3", [*context, 7], program="A")
    assert engine.controller.priority("a3")[2] < engine.controller.priority("b1")[2]


def test_sub_agents_charge_the_whole_family():
    engine = make_engine()
    serve(engine, "p1", "P", 4.0)
    serve(engine, "c1", "child", 4.0, parent_id="P")
    serve(engine, "g1", "grandchild", 1.0, parent_id="child")
    assert place(engine, "grandchild") is place(engine, "P")
    first = place(engine, "P").seq
    serve(engine, "c2", "other", 1.0, parent_id="P")
    assert place(engine, "P").is_spent
    assert place(engine, "P").seq > first
    engine.arrive("n1", [5], program="N")
    engine.arrive("c3", [6], program="yet-another", parent_id="P")
    # The family stands before N, at its new place: N came after that.
    assert order(engine, "n1", "c3") == ["c3", "n1"]


def test_waiting_siblings_move_back_when_they_reach_the_head():
    engine = make_engine()
    serve(engine, "p1", "P", 4.0)
    engine.arrive("c1", [5], program="c", parent_id="P")
    engine.arrive("n1", [6], program="N")
    serve(engine, "d1", "d", 6.0, parent_id="P")
    assert order(engine, "n1", "c1") == ["c1", "n1"]  # not looked at yet
    assert engine.controller.stand_back("c1")
    assert not engine.controller.stand_back("c1")
    assert not engine.controller.stand_back("n1")
    assert order(engine, "n1", "c1") == ["n1", "c1"]
    assert not engine.controller.stand_back("unheard of")


def test_what_was_preempted_is_in_the_middle_of_its_turn():
    engine = make_engine()
    engine.arrive("c1", [5], program="c")
    engine.admit("c1")
    serve(engine, "c2", "c", QUANTUM_S)
    engine.preempt("c1")
    assert not engine.controller.stand_back("c1")


def test_a_used_up_programs_pin_gives_way_to_who_stands_before_it_even_if_held():
    # Scenario: B comes while A runs; A's quantum is used up with that turn.
    #   1. A's next turn waits and holds the pin. B stands before it.
    #   2. B may take that pin. C, who came after A's turn, may not.
    engine = make_engine()
    engine.arrive("a1", list(range(10)), program="A")
    engine.admit("a1")
    engine.arrive("b1", [50, 51], program="B")
    engine.clock.advance(QUANTUM_S)
    engine.decode("a1", [7])
    engine.finish("a1")
    engine.arrive("a2", [*range(10), 7], program="A")
    engine.arrive("c1", [60, 61], program="C")
    assert engine.controller.reclaim(2, Urgency.WAITING, "c1") == 0
    assert engine.controller.reclaim(2, Urgency.WAITING, "b1") == 2
    assert pinned(engine) == {"A": 8}
    assert engine.controller.reclaim(8, Urgency.WAITING, "b1") == 8
    assert engine.rekeyed == ["a2"]
    engine.check()


def test_a_held_pin_within_the_quantum_is_safe():
    engine = make_engine()
    engine.arrive("b1", [50, 51], program="B")
    context = serve(engine, "a1", "A", 1.0)
    engine.arrive("a2", context, program="A")
    assert engine.controller.reclaim(1, Urgency.WAITING, "b1") == 0


# --- an ordering with a rank of its own ------------------------------------------


def test_under_plas_pins_rank_by_service_not_by_arrival():
    # A came first and was served most; N is new. A's pin is the weaker one, and B's,
    # with less service than A's, is out of A's reach.
    engine = make_engine(ordering="plas", seniority_quantum_s=1e6)
    context = serve(engine, "a1", "A", 40.0, prompt=[1, 2, 3])
    serve(engine, "b1", "B", 5.0, prompt=[11, 12, 13, 14])
    engine.arrive("n1", [21], program="N")
    engine.arrive("a2", context, program="A")
    assert order(engine, "n1", "a2") == ["n1", "a2"]
    assert engine.controller.reclaim(1, Urgency.WAITING, "a2") == 0
    assert [p.program.program_id for p in engine.controller.pins.victims()] == [
        "B",
        "A",
    ]  # A's is held
    assert engine.controller.reclaim(4, Urgency.WAITING, "n1") == 4
    assert pinned(engine) == {"A": 3}


def test_under_plas_equals_rank_in_the_order_of_their_requests():
    engine = make_engine(ordering="plas", seniority_quantum_s=1e6)
    engine.arrive("n1", [21], program="N")
    serve(engine, "a1", "A", 0.5, prompt=[1, 2, 3])
    engine.arrive("m1", [31], program="M")
    assert engine.controller.reclaim(1, Urgency.WAITING, "m1") == 0
    assert engine.controller.reclaim(1, Urgency.WAITING, "n1") == 1


def test_under_plas_a_promotion_is_for_one_call_not_for_the_pin_after_it():
    engine = make_engine(ordering="plas", seniority_quantum_s=1e6)
    context = serve(engine, "a1", "A", 40.0, prompt=[1, 2, 3])
    engine.arrive("a2", context, program="A")
    engine.controller.promote("a2")
    assert engine.admit("a2")
    engine.clock.advance(5.0)
    assert engine.decode("a2", [7])
    engine.finish("a2")
    engine.arrive("n1", [21], program="N")
    assert engine.controller.reclaim(1, Urgency.WAITING, "n1") == 1
