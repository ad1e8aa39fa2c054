"""Places in the queue: who gets which, how they are used up and taken back."""

from __future__ import annotations

import math

import pytest

from ttlcache.programs.places import (
    LEAST_TURNS,
    MAX_TENANTS,
    MIN_ENDED,
    MOST_TURNS,
    PROGRAMS_PER_QUANTUM,
    Place,
    PlaceNumbers,
    Quantum,
)
from ttlcache.testing import FakeEngine
from ttlcache.types import Urgency

QUANTUM = 3


def make_engine(**config):
    return FakeEngine(
        {
            "policy": "fixed",
            "policy_options": {"ttl_s": 1000.0},
            "ordering": "ttl-aware",
            "max_ttl_s": 1000.0,
            "max_pinned_fraction": 1.0,
            "quantum_turns": QUANTUM,
            **config,
        },
        pool_blocks=64,
        block_tokens=1,
    )


def run(engine, request_id, seconds=1.0):
    """A request that waits, from its admission to its end."""
    assert engine.admit(request_id)
    engine.clock.advance(seconds)
    assert engine.decode(request_id, [7])
    engine.finish(request_id)


def serve(engine, request_id, program, seconds, prompt=None, **hints):
    """A turn of `program` that runs for `seconds`; its context."""
    tokens = prompt or [1000 * ord(program[0]), 1, 2]
    engine.arrive(request_id, tokens, program=program, **hints)
    run(engine, request_id, seconds)
    return [*tokens, 7]


def serve_turns(engine, program, turns):
    """So many turns of one context, which is returned."""
    context = None
    for turn in range(turns):
        context = serve(engine, f"{program}{turn}", program, 1.0, prompt=context)
    return context


def order(engine, *request_ids):
    return sorted(request_ids, key=engine.controller.queue.priority)


def place(engine, program):
    return engine.controller.programs.get(("", program)).place


def pinned(engine):
    return {p.program.program_id: p.kv_blocks for p in engine.controller.pins}


# --- numbers ---------------------------------------------------------------------


def test_of_one_tenant_places_are_the_order_of_arrival():
    numbers = PlaceNumbers()
    given = []
    for _ in range(4):
        given.append(numbers.next("a"))
        numbers.on_admission(given[0])
    assert given == [1, 2, 3, 4]


def test_a_tenant_that_begins_many_contexts_stands_behind_the_first_ones_of_others():
    numbers = PlaceNumbers()
    flood = [numbers.next("a") for _ in range(64)]
    assert numbers.next("b") <= flood[0]
    numbers.on_admission(flood[9])
    assert flood[9] < numbers.next("c") <= flood[10]


def test_a_tenant_gains_nothing_for_having_been_away():
    numbers = PlaceNumbers()
    numbers.next("b")
    for _ in range(100):
        numbers.on_admission(numbers.next("a"))
    assert numbers.next("b") == 101


def test_tenants_without_number_leave_memory_bounded():
    numbers = PlaceNumbers()
    for tenant in range(3 * MAX_TENANTS):
        numbers.next(str(tenant))
    assert len(numbers._last) == MAX_TENANTS


# --- the quantum -----------------------------------------------------------------


def test_a_quantum_is_used_up_once_and_begins_anew_with_an_admission():
    mine = Place(1)
    mine.on_admission()
    assert [mine.charge(6.0, 10.0) for _ in range(2)] == [False, True]
    mine.move_back(5)
    assert not mine.charge(60.0, 10.0)  # ran on, has lost its place already
    assert (mine.seq, mine.is_used_up) == (5, True)
    mine.on_admission()
    assert not mine.is_used_up
    assert not mine.charge(9.0, 10.0)
    mine.on_admission()  # only what was used up begins anew
    assert mine.charge(1.0, 10.0)
    assert (mine.turns, mine.served_s) == (3, 82.0)


@pytest.mark.parametrize(
    ("served_s", "expected_s"),
    [
        (3.0, LEAST_TURNS),
        (20.0, PROGRAMS_PER_QUANTUM * 20.0),
        # One that never ended makes no rule.
        (10.0 * MOST_TURNS, PROGRAMS_PER_QUANTUM * MOST_TURNS),
    ],
)
def test_a_quantum_is_as_long_as_programs_need(served_s, expected_s):
    quantum = Quantum()
    assert quantum.seconds == math.inf
    quantum.on_turn(1.0)
    for _ in range(MIN_ENDED - 1):
        quantum.on_program_end(Place(1, turns=2, served_s=served_s))
    assert quantum.seconds == LEAST_TURNS  # too few
    quantum.on_program_end(Place(1, turns=1, served_s=served_s))  # one-shot
    assert quantum.seconds == LEAST_TURNS
    quantum.on_program_end(Place(1, turns=2, served_s=served_s))
    assert quantum.seconds == expected_s


def test_a_quantum_is_worth_turns_whatever_they_take():
    for turn_s in (0.01, 10.0):
        quantum = Quantum(fixed_turns=4)
        quantum.on_turn(turn_s)
        assert quantum.seconds == 4 * turn_s


def test_the_quantum_can_be_watched():
    engine = make_engine(quantum_turns=None)

    def told_s():
        gauges = engine.controller.gauges()
        return gauges["seniority_quantum_seconds"]

    assert told_s() == math.inf
    for n in range(MIN_ENDED):
        serve_turns(engine, "ABCDEFGH"[n], 20)
        engine.controller.end("", "ABCDEFGH"[n])
    assert told_s() == PROGRAMS_PER_QUANTUM * 20.0


# --- places of contexts ----------------------------------------------------------


def test_a_request_that_continues_nothing_stands_where_a_newcomer_stands():
    """Whatever id it carries: a proxy may give all its clients one."""
    engine = make_engine()
    context = serve(engine, "a1", "A", 1.0)
    engine.arrive("b1", [5, 6], program="B")
    engine.arrive("a2", [800, 801, 802], program="A")
    engine.arrive("c1", [8, 9], program="C")
    assert order(engine, "a2", "b1", "c1") == ["b1", "a2", "c1"]
    engine.arrive("a3", context, program="A")  # this one does
    assert order(engine, "a2", "a3", "b1", "c1") == ["a3", "b1", "a2", "c1"]


def test_a_context_below_a_block_is_nothing_at_stake():
    """Any prompt goes on from it: so would each request of a client with one id."""
    engine = FakeEngine({"policy": "none"}, pool_blocks=64, block_tokens=16)
    serve(engine, "a1", "A", 1.0)
    engine.arrive("b1", [5, 6], program="B")
    engine.arrive("a2", [800, 801, 802, 803, 804, 805], program="A")
    assert order(engine, "a2", "b1") == ["b1", "a2"]


def test_parallel_contexts_of_one_id_have_places_of_their_own():
    engine = make_engine(quantum_turns=100)
    one = serve(engine, "a1", "A", 1.0)
    engine.arrive("b1", [5, 6], program="B")
    engine.arrive("x1", [700, 701], program="A")  # while a2 is under way
    engine.arrive("a2", one, program="A")
    assert order(engine, "b1", "x1", "a2") == ["a2", "b1", "x1"]
    engine.admit("x1")
    engine.decode("x1", [7])
    engine.finish("x1")
    engine.arrive("x2", [700, 701, 7, 9], program="A")
    assert order(engine, "b1", "x2", "a2") == ["a2", "x2", "b1"]  # x2 claims a pin
    assert (
        engine.controller.queue.priority("x2")[3]
        > engine.controller.queue.priority("b1")[3]
    )


def test_a_sub_agent_has_a_place_of_its_own():
    engine = make_engine(quantum_turns=100)
    serve(engine, "p1", "P", 1.0)
    engine.arrive("n1", [5], program="N")
    engine.arrive("c1", [6], program="child", parent_id="P")
    assert order(engine, "n1", "c1") == ["n1", "c1"]


@pytest.mark.parametrize("ordering", ["ttl-aware", "weighted-arrival", "program-fcfs"])
def test_a_used_up_program_stands_behind_who_came_meanwhile(ordering):
    engine = make_engine(ordering=ordering)
    context = serve_turns(engine, "A", QUANTUM - 1)
    engine.arrive("b1", [5, 6], program="B")
    engine.arrive("a3", context, program="A")
    assert order(engine, "b1", "a3") == ["a3", "b1"]
    run(engine, "a3")
    engine.arrive("a4", [*context, 7], program="A")
    engine.arrive("c1", [8, 9], program="C")
    assert order(engine, "a4", "b1", "c1") == ["b1", "a4", "c1"]
    assert engine.controller.telemetry.metrics.totals["quanta_used_up", ""] == 1
    engine.check()


def test_turns_without_a_pin_stand_between_their_program_and_newcomers():
    engine = make_engine(ordering="weighted-arrival", policy="none", policy_options={})
    old = serve(engine, "a1", "A", 1.0)
    for name in "BCDE":
        engine.arrive(name, [ord(name)], program=name)
    engine.arrive("a2", old, program="A")
    engine.arrive("F", [99], program="F")
    assert order(engine, *"BCDEF", "a2") == ["B", "C", "D", "a2", "E", "F"]
    engine.check()


def test_a_branch_that_waits_at_a_used_up_place_gets_a_new_turn_number():
    """Else all branches queued before a newcomer would be served before it."""
    engine = make_engine(ordering="weighted-arrival")
    context = serve_turns(engine, "A", QUANTUM - 1)
    for branch in range(20):
        engine.arrive(f"x{branch}", [*context, 30 + branch], program="A")
    engine.arrive("b1", [5, 6], program="B")
    run(engine, "x0")
    assert place(engine, "A").is_used_up
    for branch in range(1, 20):
        assert engine.controller.queue.requeue_if_moved(f"x{branch}")
        assert order(engine, "b1", f"x{branch}")[0] == "b1"


def test_turns_count_for_their_tenant():
    """Else one that begins few contexts would come before those of others for ever."""
    engine = make_engine(
        ordering="weighted-arrival",
        policy="none",
        policy_options={},
        quantum_turns=1000,
    )
    context = None
    for turn in range(20):
        context = serve(engine, f"a{turn}", "A", 0.1, prompt=context, tenant="a")
    engine.arrive("next", context, program="A", tenant="a")
    engine.arrive("new", [99], program="N", tenant="a")
    for number in range(8):
        engine.arrive(f"b{number}", [number], program=f"B{number}", tenant="b")
    assert order(engine, "b7", "new", "next") == ["next", "new", "b7"]


def test_the_claim_counts_again_after_the_next_admission():
    engine = make_engine()
    context = serve_turns(engine, "A", QUANTUM)
    engine.arrive("a4", context, program="A")
    engine.arrive("b1", [5, 6], program="B")
    assert order(engine, "b1", "a4") == ["a4", "b1"]  # came first; no class of its own
    assert (
        engine.controller.queue.priority("a4")[2]
        == engine.controller.queue.priority("b1")[2]
    )
    run(engine, "a4")
    engine.arrive("a5", [*context, 7], program="A")
    assert (
        engine.controller.queue.priority("a5")[2]
        < engine.controller.queue.priority("b1")[2]
    )


def test_requests_that_continue_one_turn_share_its_quantum():
    """Else a client would get a new quantum for every branch."""
    engine = make_engine()
    context = serve(engine, "a1", "A", 1.0)
    for branch in range(2):
        engine.arrive(f"x{branch}", [*context, 30 + branch], program="A")
    for branch in range(2):
        run(engine, f"x{branch}")
    assert place(engine, "A").is_used_up


def test_branches_of_one_context_take_no_pins_from_each_other():
    engine = make_engine(quantum_turns=100)
    context = serve(engine, "a1", "A", 1.0)
    for branch in range(2):
        engine.arrive(f"x{branch}", [*context, 30 + branch], program="A")
    engine.admit("x0")
    engine.decode("x0", [7])
    engine.finish("x0")
    assert pinned(engine) == {"A": 5}
    assert engine.controller.memory.reclaim(1, Urgency.WAITING, "x1") == 0


def test_a_waiting_branch_moves_back_when_it_reaches_the_head():
    engine = make_engine()
    context = serve(engine, "a1", "A", 1.0)
    for branch in range(3):
        engine.arrive(f"x{branch}", [*context, 30 + branch], program="A")
    engine.arrive("n1", [6], program="N")
    for branch in range(2):
        run(engine, f"x{branch}")
    assert order(engine, "n1", "x2") == ["x2", "n1"]  # not looked at yet
    assert engine.controller.queue.requeue_if_moved("x2")
    assert not engine.controller.queue.requeue_if_moved("x2")
    assert not engine.controller.queue.requeue_if_moved("n1")
    assert order(engine, "n1", "x2") == ["n1", "x2"]
    assert not engine.controller.queue.requeue_if_moved("unheard of")


def test_what_was_preempted_is_in_the_middle_of_its_turn():
    engine = make_engine(quantum_turns=1)
    context = serve(engine, "c1", "c", 1.0)
    for branch in range(2):
        engine.arrive(f"x{branch}", [*context, 30 + branch], program="c")
    engine.admit("x0")
    run(engine, "x1")
    assert place(engine, "c").is_used_up
    engine.preempt("x0")
    assert not engine.controller.queue.requeue_if_moved("x0")


def test_a_used_up_programs_pin_gives_way_to_who_stands_before_it_even_if_held():
    # Scenario: B comes before A's last turn; A's quantum is used up with that turn.
    #   1. A's next turn waits and holds the pin. B stands before it.
    #   2. B may take that pin. C, who came after A's turn, may not.
    engine = make_engine(quantum_turns=1)
    engine.arrive("a1", list(range(10)), program="A")
    engine.arrive("b1", [50, 51], program="B")
    run(engine, "a1")
    engine.arrive("a2", [*range(10), 7], program="A")
    engine.arrive("c1", [60, 61], program="C")
    assert engine.controller.memory.reclaim(2, Urgency.WAITING, "c1") == 0
    assert engine.controller.memory.reclaim(2, Urgency.WAITING, "b1") == 2
    assert pinned(engine) == {"A": 8}
    assert engine.controller.memory.reclaim(8, Urgency.WAITING, "b1") == 8
    assert engine.rekeyed == ["a2"]
    engine.check()


def test_a_held_pin_within_the_quantum_is_safe():
    engine = make_engine()
    engine.arrive("b1", [50, 51], program="B")
    context = serve(engine, "a1", "A", 1.0)
    engine.arrive("a2", context, program="A")
    assert engine.controller.memory.reclaim(1, Urgency.WAITING, "b1") == 0
