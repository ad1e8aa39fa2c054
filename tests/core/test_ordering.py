from __future__ import annotations

import pytest

from ttlcache import config
from ttlcache.errors import ConfigError
from ttlcache.scheduling.ordering import ORDERINGS, Ordering, QueuedTurn, create
from ttlcache.testing import FakeEngine


def queued(program, request, *, turn=0, pinned=False, preempted=False, user=0):
    return QueuedTurn(
        user_priority=user,
        preempted=preempted,
        claimable=pinned,
        place_seq=program,
        request_seq=request,
        turn_seq=turn,
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
    ],
)
def test_order_of_service(name, order):
    assert served(name, ALL) == order
    assert served(name, reversed(ALL)) == order


@pytest.mark.parametrize("name", ORDERINGS)
def test_two_requests_never_share_a_key(name):
    ordering = ORDERINGS[name]()
    assert len({ordering.key(turn) for turn in ALL}) == len(ALL)


def test_the_configuration_offers_exactly_the_orderings():
    assert set(config.ORDERINGS) == {"auto", *ORDERINGS}
    for name in ORDERINGS:
        assert type(create(name)) is ORDERINGS[name]


class LastComeFirst(Ordering):
    """Somebody else's."""

    name = "last-come-first"

    def key(self, turn):
        return (-turn.request_seq,)


def test_an_ordering_of_ones_own_is_named_by_module_and_class():
    name = f"{__name__}:LastComeFirst"
    assert isinstance(create(name), LastComeFirst)
    engine = FakeEngine({"ordering": name, "admission": "none"})
    for request_id in "ab":
        engine.arrive(request_id, [1, 2, 3], program=request_id)
    order = sorted("ab", key=engine.controller.queue.priority)
    assert order == ["b", "a"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("no.such.module:Order", "No module named 'no'"),
        (f"{__name__}:NoSuchClass", "has no attribute 'NoSuchClass'"),
        ("ttlcache.types:GapKey", "is not a subclass of Ordering"),
        ("ttlcache.types:Urgency.RUNNING", "cannot load"),
    ],
)
def test_what_is_no_ordering_is_rejected_with_key_value_and_expectation(name, reason):
    with pytest.raises(ConfigError) as error:
        FakeEngine({"ordering": name})
    text = str(error.value)
    assert "'ordering'" in text
    assert repr(name) in text
    assert "expected: a subclass of" in text
    assert reason in text


def test_the_older_a_program_the_more_newcomers_its_turn_lets_pass():
    def passed_by(program, turn):
        """Newcomers between the two that are served before the program's turn."""
        turns = [queued(program, 0, turn=turn)]
        turns += [queued(n, n, turn=n) for n in range(program + 1, turn)]
        return served("weighted-arrival", turns).index(0)

    assert [passed_by(10, turn) for turn in (11, 14, 20, 30)] == [0, 2, 7, 14]
