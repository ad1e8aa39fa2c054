import pytest

from tests.core.stories import make_engine
from ttlcache import config
from ttlcache.errors import ConfigError
from ttlcache.scheduling.ordering import ORDERINGS, Ordering, QueuedTurn, create


def queued(program, request, *, pinned=False, preempted=False, **more):
    return QueuedTurn(
        preempted=preempted,
        claimable=pinned,
        queue_place=program,
        request_seq=request,
        **more,
    )


def served(name, turns):
    """Request numbers in the order in which they are served."""
    return [t.request_seq for t in sorted(turns, key=ORDERINGS[name]().key)]


#: Programs 1 and 2 came in that order, requests 1 to 4 in theirs.
ALL = [
    queued(2, 1),
    queued(1, 2),
    queued(2, 3, pinned=True),
    queued(2, 4, preempted=True),
]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ttl-aware", [4, 3, 2, 1]),
        ("program-fcfs", [4, 2, 1, 3]),
        ("request-fcfs", [4, 1, 2, 3]),
        ("expected-finish", [4, 3, 2, 1]),
    ],
)
def test_order_of_service(name, expected):
    assert served(name, ALL) == expected
    assert served(name, reversed(ALL)) == expected


@pytest.mark.parametrize(
    ("delays", "expected"),
    [
        # Work left puts a program behind so many places.
        ([(1, 9), (2, 1), (3, 3)], [2, 3, 1]),
        ([(2, 7), (1, 7)], [1, 2]),
        ([(4, 0), (1, 3)], [1, 4]),  # as far back: by arrival
    ],
)
def test_expected_work_puts_a_place_back(delays, expected):
    made = [
        queued(number, number, work_delay_places=places) for number, places in delays
    ]
    assert served("expected-finish", made) == expected


def test_before_less_work_come_preempted_turns_and_pins_as_in_the_paper():
    pinned = queued(1, 1, work_delay_places=90, pinned=True)
    preempted = queued(3, 3, work_delay_places=500, preempted=True)
    turns = [queued(2, 2, work_delay_places=1), pinned, preempted]
    assert served("expected-finish", turns) == [3, 1, 2]


def test_the_configuration_offers_exactly_the_orderings():
    assert set(config.ORDERINGS) == {"auto", *ORDERINGS}
    for name in ORDERINGS:
        assert type(create(name)) is ORDERINGS[name]
        # Two requests never share a key.
        assert len({create(name).key(turn) for turn in ALL}) == len(ALL)


class LastComeFirst(Ordering):
    """Somebody else's."""

    name = "last-come-first"

    def key(self, turn):
        return (-turn.request_seq,)


def test_an_ordering_of_ones_own_is_named_by_module_and_class():
    name = f"{__name__}:LastComeFirst"
    assert isinstance(create(name), LastComeFirst)
    engine = make_engine(ordering=name)
    for request_id in "ab":
        engine.arrive(request_id, [1, 2, 3], program=request_id)
    assert engine.order("a", "b") == ["b", "a"]


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
        make_engine(ordering=name)
    for word in ("'ordering'", repr(name), "expected: a subclass of", reason):
        assert word in str(error.value)
