"""A prompt of which a part comes back from a lower tier: what is learnt of it."""

import pytest

from tests.core.stories import make_engine

PROMPT = list(range(40))


@pytest.fixture
def engine():
    return make_engine(policy="adaptive", lower_tier="cpu")


@pytest.fixture
def tier(engine):
    return engine.controller.tier_knowledge


def test_failed_reloads_are_counted_while_their_request_lives(engine, tier):
    engine.arrive("r", PROMPT, program="A")
    engine.admit("r")
    tier.on_load_finished("r", 0, 0.5)
    tier.on_load_finished("gone", 8, 0.5)
    assert engine.total("failed_reloads") == 1
    assert engine.observed("reload_seconds") == [0.5]
    assert engine.controller.requests.keys() == {"r"}


def test_what_a_reload_cost_is_learnt(engine, tier):
    tier.on_reload_source("cpu")
    for _ in range(50):
        tier.on_load_finished("r", 1000, 0.5)
    costs = engine.controller.costs
    assert costs.reload_s("cpu", 1000) == pytest.approx(0.5, rel=0.05)
    assert engine.total("reloads", "cpu") == 50
    assert engine.total("reloaded_tokens", "cpu") == 50_000
    assert engine.observed("reload_seconds") == [0.5] * 50


# --- what the lower tier kept ---------------------------------------------------------


@pytest.fixture
def seen(engine, tier):
    """What is learnt of the lower tier, which is up."""
    seen = []
    engine.controller.costs.observe_lost = lambda *told: seen.append(told)
    tier.on_reload_source("cpu")
    engine.turn("first", PROMPT, [1], program="A")
    engine.arrive("r", [*PROMPT, 1, *range(100, 120)], program="A")
    tier.on_lookup("r")
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
def test_what_a_return_found_below(engine, tier, seen, cached, reloaded, told):
    engine.controller.on_prefilled("r")  # not admitted yet
    engine.controller.on_prefilled("gone")
    engine.controller.on_allocated("r", cached)
    if reloaded is not None:
        tier.on_load_finished("r", reloaded, 0.5)
    engine.step(seconds=1.0)
    engine.controller.on_prefilled("r")
    engine.controller.on_prefilled("r")
    assert seen == told


def test_what_a_preempted_request_computed_itself_was_not_below(engine, seen):
    engine.controller.on_allocated("r", 0)
    engine.step(seconds=1.0)
    engine.controller.on_allocated("r", 36)  # of its own blocks, after a preemption
    engine.controller.on_prefilled("r")
    assert seen == [(40, False)]


@pytest.mark.parametrize("event", ["away", "down", "reset", "not asked", "another"])
def test_what_the_tier_cannot_have_says_nothing_of_it(engine, tier, seen, event):
    if event in ("away", "down"):
        tier.on_reload_source(None)
    if event == "away":
        tier.on_reload_source("cpu")
    elif event == "reset":
        engine.controller.memory.release_all()
    elif event == "another":
        tier.on_new_generation()
    elif event == "not asked":
        engine.abort("r")
        engine.arrive("r", [*PROMPT, 1, 2], program="A")
    engine.controller.on_allocated("r", 0)
    if event == "down":
        tier.on_reload_source("cpu")
    engine.controller.on_prefilled("r")
    assert seen == []


@pytest.mark.parametrize(
    ("source", "hints", "chunk_tokens", "is_told"),
    [
        ("cpu", {}, 41, True),
        ("cpu", {}, 42, False),
        ("cpu", {"ttl": -1}, 1, False),
        (None, {}, 1, False),
    ],
)
def test_a_turn_that_never_went_down_says_nothing(
    engine, tier, seen, source, hints, chunk_tokens, is_told
):
    tier.on_reload_source(source)
    context = engine.turn("b", list(range(500, 540)), program="B", **hints)
    tier.on_reload_source("cpu")
    engine.arrive("c", [*context, 1], program="B")
    tier.on_lookup("c", chunk_tokens)
    engine.controller.on_allocated("c", 0)
    engine.controller.on_prefilled("c")
    assert bool(seen) is is_told


def test_a_new_program_lost_nothing(engine, tier, seen):
    engine.arrive("new", list(range(500, 540)), program="B")
    tier.on_lookup("new")
    engine.admit("new")
    engine.decode("new", [1])
    assert seen == []
