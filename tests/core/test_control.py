"""What clients say between turns: a program's end, a tool's progress."""

import pytest

from tests.core.stories import make_engine
from ttlcache.control import obey, remaining_s


def engine_with_pin(**config):
    engine = make_engine(5.0, **config)
    # Prefill of a context like this takes 20 s: worth waiting for.
    engine.controller.costs._steps.prefill = (0.5, 0.0, 0.0)
    engine.turn("r1", list(range(40)), [90], program="p", ttl=None)
    return engine


@pytest.fixture
def engine():
    return engine_with_pin()


def tell(engine, do, **fields):
    order = {"do": do, "program_id": "p", **fields}
    answer = obey(engine.controller, order, engine.clock.now_s())
    engine.check()
    return answer


def ttl_left(engine):
    return engine.deadlines()["p"] - engine.clock.now_s()


def test_an_id_is_tried_as_it_was_sent_too(engine):
    told = tell(engine, "progress", program_id="other", as_sent=["p"], eta_s=1.0)
    assert told["known"]
    assert len(told["pins"]) == 1
    told = tell(engine, "end", program_id="other", as_sent=["no", "p"])
    assert told == {"known": True}


def test_another_tenants_program_is_unknown(engine):
    assert tell(engine, "end", cache_salt="other") == {"known": False}
    assert len(engine.pins()) == 1


def test_an_eta_that_is_worth_it_moves_the_deadline(engine):
    benefit_s = engine.controller.costs.recovery_s(40)
    answer = tell(engine, "progress", eta_s=benefit_s / 2)
    assert answer["known"] is True
    assert ttl_left(engine) == pytest.approx(benefit_s / 2 + 1.0)
    assert answer["pins"][0]["ttl_left_s"] == pytest.approx(ttl_left(engine), abs=0.01)


def test_an_eta_beyond_the_worth_releases_now(engine):
    tell(engine, "progress", eta_s=10 * engine.controller.costs.recovery_s(40))
    assert engine.pins() == []
    assert engine.outcomes() == {"expired": 1}


@pytest.mark.parametrize(
    ("told", "left_s"),
    [
        ({"eta_s": 3}, 3.0),
        ({"done": 2, "total": 8}, 12.0),
        ({"done": 2, "total": 8, "elapsed_s": 1.0}, 3.0),
        ({"done": 9, "total": 8}, 0.0),
        ({}, None),
        ({"done": 0, "total": 8}, None),
        ({"done": 3}, None),
    ],
)
def test_done_of_total_is_extrapolated(told, left_s):
    assert remaining_s(told, waited_s=4.0) == left_s


def test_progress_that_says_nothing_changes_nothing(engine):
    before = ttl_left(engine)
    assert tell(engine, "progress", done=0, total=9)["pins"]
    assert ttl_left(engine) == before


def test_an_eta_counts_from_now_on_and_not_from_the_turns_end():
    engine = engine_with_pin()
    engine.step(seconds=4.0)
    tell(engine, "progress", eta_s=3.0)
    assert ttl_left(engine) > 3.0


def test_max_ttl_bounds_the_whole_gap():
    engine = engine_with_pin(max_ttl_s=6.0)
    engine.step(seconds=4.0)
    tell(engine, "progress", eta_s=5.0)
    assert ttl_left(engine) == pytest.approx(2.0)


def test_a_policy_that_reads_etas_is_asked():
    engine = engine_with_pin(policy="adaptive")
    tell(engine, "progress", eta_s=1.0)
    # An idle pool costs nothing: adaptive holds on, within max_ttl_s.
    assert ttl_left(engine) == pytest.approx(300.0)


def test_a_pin_that_progress_prolongs_while_memory_is_free_is_decided_again():
    engine = engine_with_pin(policy="adaptive")
    (pin,) = engine.pins()
    engine.controller.pins.set_deadline(pin, pin.deadline_s, uncontended=False)
    tell(engine, "progress", eta_s=250.0)
    assert engine.controller.pins.pop_uncontended(1) == [pin]


def test_a_pin_whose_next_turn_waits_is_left_alone(engine):
    engine.arrive("r2", [*range(40), 90, 1], program="p")
    tell(engine, "progress", eta_s=1e6)
    assert len(engine.pins()) == 1


def test_the_listing_shows_the_newest_first(engine):
    engine.step(seconds=1.0)
    engine.turn("q1", list(range(100, 120)), [91], program="q")
    answer = tell(engine, "programs")
    first, second = answer["programs"]
    assert (first["program"], second["program"]) == ("q", "p")
    assert second["ttl_left_s"] == pytest.approx(4.0)
    assert second["tool"] == "tool"
    assert answer["totals"]["pins_started"] == 2


def test_a_program_without_an_id_is_told_of_under_the_one_that_is_shown(engine):
    tell(engine, "end")
    engine.turn("r2", list(range(50, 90)), [90])
    (row,) = tell(engine, "programs")["programs"]
    told = {"program_id": row["program"]}
    assert len(tell(engine, "progress", **told, eta_s=1.0)["pins"]) == 1
    for wrong in ({"cache_salt": "other"}, {"program_id": "anonymous-0-2"}):
        assert tell(engine, "end", **{**told, **wrong}) == {"known": False}
    assert len(engine.pins()) == 1
    assert tell(engine, "end", **told) == {"known": True}
    assert engine.pins() == []
