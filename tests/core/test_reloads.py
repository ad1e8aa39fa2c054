"""A prompt of which a part comes back from a lower tier: what is learnt of it."""

from __future__ import annotations

import pytest

from ttlcache.testing import FakeEngine

PROMPT = list(range(40))


@pytest.fixture
def engine():
    return FakeEngine()


def counted(engine, name, label=""):
    return engine.controller.telemetry.metrics.totals[name, label]


def admit(engine, request_id="r"):
    engine.arrive(request_id, PROMPT, program="A")
    engine.admit(request_id)


def test_failed_reloads_are_counted_while_their_request_lives(engine):
    admit(engine)
    engine.controller.tier.on_load_finished("r", 0)
    engine.controller.tier.on_load_finished("gone", 8)
    assert counted(engine, "failed_reloads") == 1
    assert engine.controller.requests.keys() == {"r"}


def test_what_a_reload_cost_is_learnt_per_tier(engine):
    for _ in range(50):
        engine.controller.tier.learn_reload("cpu", 1000, 0.5)
    assert engine.controller.costs.reload_s("cpu", 1000) == pytest.approx(0.5, rel=0.05)
    assert engine.controller.costs.tiers == ("cpu",)
    assert counted(engine, "reloads", "cpu") == 50
    assert counted(engine, "reloaded_tokens", "cpu") == 50_000
    assert (
        engine.controller.telemetry.metrics.observations["reload_seconds"] == [0.5] * 50
    )


def test_a_reload_from_nobody_knows_where_is_counted_and_teaches_nothing(engine):
    engine.controller.tier.learn_reload(None, 1000, 0.5)
    assert engine.controller.costs.tiers == ()
    assert counted(engine, "reloads", "unknown") == 1
    assert counted(engine, "reloaded_tokens", "unknown") == 1000


# --- what the lower tier kept ---------------------------------------------------------


@pytest.fixture
def seen(engine):
    """What is learnt of the lower tier, which is up."""
    seen = []
    engine.controller.costs.observe_lost = lambda *told: seen.append(told)
    engine.controller.tier.on_source("cpu")
    engine.arrive("first", PROMPT, program="A")
    engine.admit("first")
    engine.decode("first", [1])
    engine.finish("first")
    engine.arrive("r", [*PROMPT, 1, *range(100, 120)], program="A")
    engine.controller.tier.on_lookup("r")
    return seen


@pytest.mark.parametrize(
    ("cached", "reloaded", "told"),
    [
        (0, 40, [(40, True)]),
        (0, 24, [(40, True)]),  # the rest filled no chunk
        (0, 16, [(40, False)]),
        (0, None, [(40, False)]),
        (0, 0, [(40, False)]),  # it failed
        (16, 8, [(24, True)]),
        (16, None, [(24, False)]),
        (20, None, []),  # only a tail was lost
        (36, None, []),  # a block that was not full, or that speculation drops
        (40, None, []),
    ],
)
def test_what_a_return_found_below(engine, seen, cached, reloaded, told):
    engine.controller.prefilled("r")  # not admitted yet
    engine.controller.prefilled("gone")
    engine.controller.on_allocated("r", cached)
    if reloaded is not None:
        engine.controller.tier.on_load_finished("r", reloaded)
    engine.step(seconds=1.0)
    engine.controller.prefilled("r")
    engine.controller.prefilled("r")
    assert seen == told


def test_what_a_preempted_request_computed_itself_was_not_below(engine, seen):
    engine.controller.on_allocated("r", 0)
    engine.step(seconds=1.0)
    engine.controller.on_allocated("r", 36)  # of its own blocks, after a preemption
    engine.controller.prefilled("r")
    assert seen == [(40, False)]


def test_while_the_tier_is_down_nothing_is_learnt_of_it(engine, seen):
    engine.controller.tier.on_source(None)
    engine.controller.on_allocated("r", 0)
    engine.controller.tier.on_source("cpu")
    engine.controller.prefilled("r")
    assert seen == []


@pytest.mark.parametrize("event", ["away", "reset", "not asked", "another"])
def test_what_the_tier_cannot_have_says_nothing_of_it(engine, seen, event):
    controller = engine.controller
    if event == "away":
        controller.tier.on_source(None)
        controller.tier.on_source("cpu")
    elif event == "reset":
        controller.memory.release_all()
    elif event == "another":
        controller.tier.on_new_generation()
    else:
        engine.abort("r")
        engine.arrive("r", [*PROMPT, 1, 2], program="A")
    controller.on_allocated("r", 0)
    controller.prefilled("r")
    assert seen == []


@pytest.mark.parametrize(
    ("up", "hints", "chunk_tokens"),
    [(True, {"ttl": -1}, 1), (False, {}, 1), (True, {}, 42), (True, {}, 41)],
)
def test_a_turn_that_never_went_down_says_nothing(
    engine, seen, up, hints, chunk_tokens
):
    controller = engine.controller
    controller.tier.on_source("cpu" if up else None)
    context = engine.turn("b", list(range(500, 540)), program="B", **hints)
    controller.tier.on_source("cpu")
    engine.arrive("c", [*context, 1], program="B")
    controller.tier.on_lookup("c", chunk_tokens)
    controller.on_allocated("c", 0)
    controller.prefilled("c")
    assert bool(seen) is (up and not hints and chunk_tokens == 41)


def test_a_new_program_lost_nothing(engine, seen):
    engine.arrive("new", list(range(500, 540)), program="B")
    engine.controller.tier.on_lookup("new")
    engine.admit("new")
    engine.decode("new", [1])
    assert seen == []
