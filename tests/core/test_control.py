"""What clients say between turns: a program's end, a tool's progress."""

from __future__ import annotations

import pytest

from ttlcache.control import obey, remaining_s
from ttlcache.testing.fake_engine import FakeEngine


def engine_with_pin(policy: str = "fixed", **options: object) -> FakeEngine:
    config = {"policy": policy}
    if policy == "fixed":
        config["policy_options"] = {"ttl_s": 5.0}
    engine = FakeEngine({**config, **options})
    # Prefill of a context like this takes 20 s: worth waiting for.
    engine.controller.costs.observe_prefill(40, 0, 20.0)
    engine.turn("r1", list(range(40)), [90], program="p", ttl=None)
    return engine


def progress(engine: FakeEngine, **fields: object) -> dict:
    order = {"do": "progress", "program_id": "p", **fields}
    return obey(engine.controller, order, engine.clock.now_s())


def ttl_left(engine: FakeEngine) -> float | None:
    pins = list(engine.controller.pins)
    return pins[0].deadline_s - engine.clock.now_s() if pins else None


def test_an_id_is_tried_as_it_was_sent_too():
    engine = engine_with_pin()
    order = {"do": "end", "program_id": "other", "as_sent": ["no", "p"]}
    assert obey(engine.controller, order, 0.0) == {"known": True}
    engine = engine_with_pin()
    told = progress(engine, program_id="other", as_sent=["p"], eta_s=1.0)
    assert told["known"]
    assert len(told["pins"]) == 1


def test_the_end_releases_everything_at_once():
    engine = engine_with_pin()
    assert len(engine.controller.pins) == 1
    end = {"do": "end", "program_id": "p"}
    assert obey(engine.controller, end, 0.0) == {"known": True}
    assert len(engine.controller.pins) == 0
    assert obey(engine.controller, end, 0.0) == {"known": False}
    engine.check()


def test_another_tenants_program_is_unknown():
    engine = engine_with_pin()
    order = {"do": "end", "program_id": "p", "cache_salt": "other"}
    assert obey(engine.controller, order, 0.0) == {"known": False}
    assert len(engine.controller.pins) == 1


def test_an_eta_that_is_worth_it_moves_the_deadline():
    engine = engine_with_pin()
    benefit_s = engine.controller.costs.recovery_s(40)
    answer = progress(engine, eta_s=benefit_s / 2)
    assert answer["known"] is True
    assert ttl_left(engine) == pytest.approx(benefit_s / 2 + 1.0)
    assert answer["pins"][0]["ttl_left_s"] == pytest.approx(ttl_left(engine), abs=0.01)


def test_an_eta_beyond_the_worth_releases_now():
    engine = engine_with_pin()
    progress(engine, eta_s=10 * engine.controller.costs.recovery_s(40))
    assert ttl_left(engine) is None
    assert engine.controller.telemetry.metrics.totals["pins", "expired"] == 1
    engine.check()


def test_done_of_total_is_extrapolated():
    assert remaining_s({"eta_s": 3}, waited_s=9.0) == 3.0
    assert remaining_s({"done": 2, "total": 8}, waited_s=4.0) == 12.0
    assert remaining_s({"done": 2, "total": 8, "elapsed_s": 1.0}, waited_s=4.0) == 3.0
    assert remaining_s({"done": 9, "total": 8}, waited_s=4.0) == 0.0
    for nothing in ({}, {"done": 0, "total": 8}, {"done": 3}):
        assert remaining_s(nothing, waited_s=4.0) is None


def test_progress_that_says_nothing_changes_nothing():
    engine = engine_with_pin()
    before = ttl_left(engine)
    assert progress(engine, done=0, total=9)["pins"]
    assert ttl_left(engine) == before


def test_max_ttl_bounds_the_whole_gap():
    engine = engine_with_pin(max_ttl_s=6.0)
    engine.step(seconds=4.0)
    progress(engine, eta_s=5.0)
    assert ttl_left(engine) == pytest.approx(2.0)


def test_a_policy_that_reads_etas_is_asked():
    engine = engine_with_pin("adaptive")
    progress(engine, eta_s=1.0)
    # An idle pool costs nothing: adaptive holds on, within max_ttl_s.
    assert ttl_left(engine) == pytest.approx(300.0)


def test_a_pin_whose_next_turn_waits_is_left_alone():
    engine = engine_with_pin()
    engine.arrive("r2", [*range(40), 90, 1], program="p")
    progress(engine, eta_s=1e6)
    assert len(engine.controller.pins) == 1


def test_the_listing_shows_the_newest_first():
    engine = engine_with_pin()
    engine.step(seconds=1.0)
    engine.turn("q1", list(range(100, 120)), [91], program="q")
    answer = obey(engine.controller, {"do": "programs"}, engine.clock.now_s())
    first, second = answer["programs"]
    assert (first["program"], second["program"]) == ("q", "p")
    assert second["ttl_left_s"] == pytest.approx(4.0)
    assert second["tool"] == "tool"
    assert answer["totals"]["pins_started"] == 2
