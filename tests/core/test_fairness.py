"""Places in the queue: who gets which, how they are used up and taken back."""

import math

import pytest

from tests.core import stories
from tests.core.stories import token_engine
from ttlcache.programs import fair_queueing
from ttlcache.programs.fair_queueing import MIN_ENDED, Place, PlaceNumbers, Quantum
from ttlcache.types import Urgency

QUANTUM = 3


def make_engine(**config):
    config = {"ordering": "ttl-aware", "quantum_turns": QUANTUM, **config}
    return token_engine(1000.0, pool_blocks=64, max_ttl_s=1000.0, **config)


def run(engine, request_id, seconds=1.0):
    """A request that waits, from its admission to its end."""
    assert engine.admit(request_id)
    engine.clock.advance(seconds)
    assert engine.decode(request_id, [7])
    engine.finish(request_id)


def serve(engine, request_id, program, seconds=1.0, prompt=None, **hints):
    """A turn of `program` that runs for `seconds`; its context."""
    tokens = prompt or [1000 * ord(program[0]), 1, 2]
    engine.arrive(request_id, tokens, program=program, **hints)
    run(engine, request_id, seconds)
    return [*tokens, 7]


def serve_turns(engine, program, turns, **hints):
    """So many turns of one context, which is returned."""
    context = None
    for turn in range(turns):
        context = serve(engine, f"{program}{turn}", program, prompt=context, **hints)
    return context


def arrive_branches(engine, program, context, number):
    """Requests x0, x1, … that continue one context."""
    for branch in range(number):
        engine.arrive(f"x{branch}", [*context, 30 + branch], program=program)


# --- numbers ---------------------------------------------------------------------


def test_a_tenant_that_begins_many_contexts_stands_behind_the_first_ones_of_others():
    numbers = PlaceNumbers()
    flood = [numbers.next("a") for _ in range(64)]
    assert numbers.next("b") <= flood[0]
    numbers.on_allocated(flood[9])
    assert flood[9] < numbers.next("c") <= flood[10]


def test_a_tenant_gains_nothing_for_having_been_away():
    numbers = PlaceNumbers()
    numbers.next("b")
    for _ in range(100):
        numbers.on_allocated(numbers.next("a"))
    assert numbers.next("b") == 101
    numbers.give_back("b", 1)  # it was passed long ago
    assert numbers.next("b") == 102


def test_what_a_tenant_gave_up_does_not_stand_before_its_next_request():
    engine = make_engine()
    engine.arrive("b0", [50, 51], program="B")
    for number in range(100):
        engine.arrive(f"a{number}", [60, number], tenant="a")
    for number in range(100):
        engine.abort(f"a{number}")
    engine.arrive("a", [61], program="A", tenant="a")
    assert engine.controller.requests["a"].place.seq == 1


@pytest.mark.parametrize("ends", [False, True])
def test_a_tenant_cannot_give_back_what_still_stands(ends):
    # Scenario: beside 10 requests that wait, one comes and goes again and again under
    # one id, or is said to be over while it waits.
    engine = make_engine()
    for number in range(10):
        engine.arrive(f"a{number}", [60, number], program=f"A{number}", tenant="a")
    for number in range(10):
        engine.arrive(f"x{number}", [70, number], program="X", tenant="a")
        if ends:
            engine.end("X", tenant="a")
        else:
            engine.abort(f"x{number}")
    engine.arrive("last", [61], program="A", tenant="a")
    assert engine.controller.requests["last"].place.seq > (20 if ends else 10)


def test_tenants_without_number_leave_memory_bounded():
    numbers = PlaceNumbers()
    for tenant in range(3 * fair_queueing.MAX_TENANTS):
        numbers.next(str(tenant))
    assert len(numbers._tenants) == fair_queueing.MAX_TENANTS


# --- the quantum -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("served_s", "expected_s"),
    [
        (3.0, fair_queueing.LEAST_TURNS),
        (20.0, fair_queueing.PROGRAMS_PER_QUANTUM * 20.0),
        # One that never ended makes no rule.
        (
            10.0 * fair_queueing.MOST_TURNS,
            fair_queueing.PROGRAMS_PER_QUANTUM * fair_queueing.MOST_TURNS,
        ),
    ],
)
def test_a_quantum_is_as_long_as_programs_need(served_s, expected_s):
    quantum = Quantum()
    assert quantum.seconds == math.inf
    quantum.on_turn(1.0, is_first=False)
    for _ in range(MIN_ENDED - 1):
        quantum.on_program_end(Place(1, turns=2, served_s=served_s))
    assert quantum.seconds == fair_queueing.LEAST_TURNS  # too few
    quantum.on_program_end(Place(1, turns=1, served_s=served_s))  # one-shot
    assert quantum.seconds == fair_queueing.LEAST_TURNS
    quantum.on_program_end(Place(1, turns=2, served_s=served_s))
    assert quantum.seconds == expected_s


def test_a_quantum_ends_after_many_turns_however_short_and_later_ones_sooner():
    quantum, place = Quantum(), Place(1)
    assert quantum.turns == fair_queueing.LEAST_TURNS
    for _ in range(MIN_ENDED):
        quantum.on_program_end(Place(1, turns=30))
    for turn in range(1, 121):
        place.on_allocated()
        assert place.charge(0.01, quantum) == (turn == 120)
    for seq in (2, 3):
        place.move_back(seq)
        for turn in range(1, 31):
            place.on_allocated()
            assert place.charge(0.01, quantum) == (turn == 30)


def test_a_flood_of_one_shot_requests_makes_no_quanta():
    quantum = Quantum()
    for _ in range(10):
        quantum.on_turn(10.0, is_first=False)
    for _ in range(2000):
        quantum.on_turn(0.02, is_first=True)
    assert quantum.seconds == 10.0 * fair_queueing.LEAST_TURNS
    quantum.on_turn(1e9, is_first=False)  # one that was paused
    assert quantum.seconds < 1000.0 * fair_queueing.LEAST_TURNS


def test_a_used_up_place_of_an_ended_program_is_given_back():
    engine = make_engine(quantum_turns=1)
    serve(engine, "a1", "A")
    engine.end("A")
    engine.arrive("b1", [5, 6], program="B")
    assert engine.controller.requests["b1"].place.seq == 2


# --- places of contexts ----------------------------------------------------------


def test_a_request_that_continues_nothing_stands_where_a_newcomer_stands():
    """Whatever id it carries: a proxy may give all its clients one."""
    engine = make_engine()
    context = serve(engine, "a1", "A")
    engine.arrive("b1", [5, 6], program="B")
    engine.arrive("a2", [800, 801, 802], program="A")
    engine.arrive("sub", [6], program="child", parent_id="A")
    engine.arrive("c1", [8, 9], program="C")
    assert engine.order("sub", "a2", "b1", "c1") == ["b1", "a2", "sub", "c1"]
    engine.arrive("a3", context, program="A")  # this one does
    assert engine.order("a2", "a3", "b1", "c1") == ["a3", "b1", "a2", "c1"]


def test_a_context_below_a_block_is_nothing_at_stake():
    """Any prompt goes on from it: so would each request of a client with one id."""
    engine = stories.make_engine(policy="none", block_tokens=16)
    serve(engine, "a1", "A")
    engine.arrive("b1", [5, 6], program="B")
    engine.arrive("a2", [800, 801, 802, 803, 804, 805], program="A")
    assert engine.order("a2", "b1") == ["b1", "a2"]


def test_parallel_contexts_of_one_id_have_places_of_their_own():
    engine = make_engine(quantum_turns=100)
    one = serve(engine, "a1", "A")
    engine.arrive("b1", [5, 6], program="B")
    engine.arrive("x1", [700, 701], program="A")  # while a2 is under way
    engine.arrive("a2", one, program="A")
    assert engine.order("b1", "x1", "a2") == ["a2", "b1", "x1"]
    run(engine, "x1")
    engine.arrive("x2", [700, 701, 7, 9], program="A")
    assert engine.order("b1", "x2", "a2") == ["a2", "x2", "b1"]  # x2 claims a pin
    priority = engine.controller.queue.priority
    assert priority("x2")[3] > priority("b1")[3]


@pytest.mark.parametrize("ordering", ["ttl-aware", "program-fcfs"])
def test_a_used_up_program_stands_behind_who_came_meanwhile(ordering):
    engine = make_engine(ordering=ordering)
    context = serve_turns(engine, "A", QUANTUM - 1)
    engine.arrive("b1", [5, 6], program="B")
    engine.arrive("a3", context, program="A")
    assert engine.order("b1", "a3") == ["a3", "b1"]
    run(engine, "a3")
    engine.arrive("a4", [*context, 7], program="A")
    engine.arrive("c1", [8, 9], program="C")
    assert engine.order("a4", "b1", "c1") == ["b1", "a4", "c1"]
    assert engine.total("quanta_used_up") == 1


def test_the_claim_counts_again_after_the_next_admission():
    engine = make_engine(quantum_turns=8)
    priority = engine.controller.queue.priority
    context = serve_turns(engine, "A", 8)
    engine.arrive("a4", context, program="A")
    engine.arrive("b1", [5, 6], program="B")
    assert engine.order("b1", "a4") == ["a4", "b1"]  # came first; no class of its own
    assert priority("a4")[2] == priority("b1")[2]
    run(engine, "a4")
    engine.arrive("a5", [*context, 7], program="A")
    assert priority("a5")[2] < priority("b1")[2]


def test_branches_of_one_context_take_no_pins_from_each_other():
    engine = make_engine(quantum_turns=100)
    arrive_branches(engine, "A", serve(engine, "a1", "A"), 2)
    run(engine, "x0")
    assert engine.pinned() == {"A": 5}
    assert engine.reclaim(1, Urgency.WAITING, "x1") == 0


def test_a_waiting_branch_moves_back_when_it_reaches_the_head():
    """Requests that continue one turn share its quantum."""
    engine = make_engine()
    arrive_branches(engine, "A", serve(engine, "a1", "A"), 3)
    engine.arrive("n1", [6], program="N")
    for branch in range(2):
        run(engine, f"x{branch}")
    assert engine.program("A").place.is_used_up
    assert engine.order("n1", "x2") == ["x2", "n1"]  # not looked at yet
    refresh_place = engine.controller.queue.refresh_place
    assert refresh_place("x2")
    assert not refresh_place("x2")
    assert not refresh_place("n1")
    assert engine.order("n1", "x2") == ["n1", "x2"]
    assert not refresh_place("unheard of")


def test_what_was_preempted_is_in_the_middle_of_its_turn():
    engine = make_engine(quantum_turns=1)
    arrive_branches(engine, "c", serve(engine, "c1", "c"), 2)
    engine.admit("x0")
    run(engine, "x1")
    assert engine.program("c").place.is_used_up
    engine.preempt("x0")
    assert not engine.controller.queue.refresh_place("x0")


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
    assert engine.reclaim(2, Urgency.WAITING, "c1") == 0
    assert engine.reclaim(2, Urgency.WAITING, "b1") == 2
    assert engine.pinned() == {"A": 8}
    assert engine.reclaim(8, Urgency.WAITING, "b1") == 8
    assert engine.rekeyed == ["a2"]
