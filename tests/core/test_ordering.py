from __future__ import annotations

import math

import pytest

from ttlcache.config import TTLCacheConfig
from ttlcache.scheduling.ordering import ORDERINGS, PLAS, QueuedTurn


def queued(program, request, *, turn=0, pinned=False, preempted=False, user=0, **times):
    return QueuedTurn(
        user_priority=user,
        preempted=preempted,
        claimable=pinned,
        program_seq=program,
        request_seq=request,
        turn_seq=turn,
        **times,
    )


def served(name, turns):
    """Request numbers in the order in which they are served."""
    return [t.request_seq for t in sorted(turns, key=ORDERINGS[name]().key)]


# Programs 1 and 2 came in that order, requests 1 to 5 in theirs.
FIRST_OF_2 = queued(2, 1)
FIRST_OF_1 = queued(1, 2)
PINNED_OF_2 = queued(2, 3, pinned=True)
PREEMPTED_OF_2 = queued(2, 4, preempted=True)
URGENT_OF_2 = queued(2, 5, user=-1)
ALL = [FIRST_OF_2, FIRST_OF_1, PINNED_OF_2, PREEMPTED_OF_2, URGENT_OF_2]


@pytest.mark.parametrize(
    ("name", "order"),
    [
        ("ttl-aware", [5, 4, 3, 2, 1]),
        ("weighted-arrival", [5, 4, 3, 2, 1]),
        ("program-fcfs", [5, 4, 2, 1, 3]),
        ("request-fcfs", [5, 4, 1, 2, 3]),
        ("plas", [5, 4, 1, 2, 3]),  # nobody was served yet: first come
    ],
)
def test_order_of_service(name, order):
    assert served(name, ALL) == order
    assert served(name, reversed(ALL)) == order


@pytest.mark.parametrize("name", ORDERINGS)
def test_two_requests_never_share_a_key(name):
    ordering = ORDERINGS[name]()
    assert len({ordering.key(turn) for turn in ALL}) == len(ALL)


@pytest.mark.parametrize("name", sorted(set(ORDERINGS) - {"plas"}))
def test_orderings_without_anti_starvation_never_promote(name):
    starved = queued(1, 1, service_s=1.0, wait_s=1e6)
    assert ORDERINGS[name]().promote_at_s(starved) == math.inf


# --- PLAS: one second of service, then doubling queues -------------------------


@pytest.mark.parametrize(
    ("service_s", "level"),
    [
        (0.0, 0),
        (0.9, 0),
        (1.0, 1),
        (1.9, 1),
        (2.0, 2),
        (3.9, 2),
        (4.0, 3),
        (8.0, 4),
        (1024.0, 11),
        (16383.0, 14),
        (16384.0, 15),
        (1e9, 15),  # the last queue takes all the rest
    ],
)
def test_service_ranges_double(service_s, level):
    assert PLAS().level(service_s) == level


def test_the_least_served_program_goes_first_and_equals_in_turn():
    much = queued(1, 1, service_s=5.0)
    little = queued(2, 2, service_s=0.5)
    some = queued(3, 3, service_s=1.2)
    as_much = queued(4, 4, service_s=7.9)  # between 4 s and 8 s, as `much` is
    assert served("plas", [as_much, much, some, little]) == [2, 3, 1, 4]


def test_pins_and_arrival_of_programs_mean_nothing_to_plas():
    pinned = queued(1, 2, pinned=True, service_s=3.0)
    older_call = queued(2, 1, service_s=3.0)
    assert served("plas", [pinned, older_call]) == [1, 2]


def test_a_starved_call_is_promoted_when_its_wait_is_four_times_the_service():
    # Service 3 s: due at 12 s of waiting; 2 s were waited before this call.
    call = queued(1, 1, service_s=3.0, wait_s=2.0, queued_s=100.0)
    assert PLAS().promote_at_s(call) == 110.0
    # More than that waited already: due at once, never in the past.
    overdue = queued(1, 1, service_s=3.0, wait_s=50.0, queued_s=100.0)
    assert PLAS().promote_at_s(overdue) == 100.0


def test_a_promoted_call_stands_in_the_first_queue_and_stays_there():
    promoted = queued(1, 9, service_s=500.0, promoted=True)
    fresh = queued(2, 10)
    assert served("plas", [fresh, promoted]) == [9, 10]
    assert PLAS().promote_at_s(promoted) == math.inf


def test_a_call_in_the_first_queue_has_nowhere_to_be_promoted_to():
    assert PLAS().promote_at_s(queued(1, 1, service_s=0.9, wait_s=99.0)) == math.inf


def test_the_configuration_offers_exactly_the_orderings():
    annotation = TTLCacheConfig.model_fields["ordering"].annotation
    assert set(annotation.__args__) == {"auto", *ORDERINGS}


def test_the_older_a_program_the_more_newcomers_its_turn_lets_pass():
    def passed_by(program, turn):
        """Newcomers between the two that are served before the program's turn."""
        turns = [queued(program, 0, turn=turn)]
        turns += [queued(n, n, turn=n) for n in range(program + 1, turn)]
        return served("weighted-arrival", turns).index(0)

    assert [passed_by(10, turn) for turn in (11, 14, 20, 30)] == [0, 2, 7, 14]
