"""Policy `observe`: would-be pins, and what real ones would have saved.

Blocks of four tokens, sixteen of them; a token's prefill takes a second. Program "a"
has a context of five full blocks.
"""

import pytest

from tests.core.stories import make_engine, with_prefill_cost
from ttlcache import control
from ttlcache.cli.top import summary_line
from ttlcache.config import admission_in_force, load_config, ordering_in_force
from ttlcache.errors import ConfigError
from ttlcache.types import PinOutcome

CONTEXT_A = list(range(17))


@pytest.fixture
def engine():
    return with_prefill_cost(make_engine(policy="observe", pool_blocks=16))


def savable(engine):
    return (
        engine.total("prefill_tokens_savable"),
        engine.total("prefill_seconds_savable"),
    )


def flood(engine, tokens=60):
    """A new program takes so much memory for its only turn."""
    engine.turn("flood", list(range(300, 300 + tokens)), is_last_step=True)


def test_what_the_cache_lost_and_a_pin_would_have_kept_is_savable(engine):
    context = engine.turn("a1", CONTEXT_A, [90, 91, 92, 93], program="a")
    assert engine.pinned() == {"a": 5}
    assert not engine.holder.blocks_by_pin, "the engine's blocks are left alone"
    flood(engine)
    engine.step(seconds=2.0)
    engine.turn("a2", [*context, 1, 2, 3], program="a")
    assert savable(engine) == (20, 20.0)
    for real in ("claimed_tokens", "prefill_tokens_saved", "prefill_seconds_saved"):
        assert engine.total(real) == 0
    assert engine.total("evicted_returns") == 1


def test_what_the_cache_still_has_is_not_savable(engine):
    context = engine.turn("a1", CONTEXT_A, [90, 91, 92, 93], program="a")
    engine.step(seconds=2.0)
    engine.turn("a2", [*context, 1, 2, 3], program="a")
    assert savable(engine) == (0, 0.0)
    assert engine.counted_outcomes() == {PinOutcome.CLAIMED: 1}


def test_pins_made_while_memory_was_free_are_decided_anew_when_it_is_not(engine):
    context = engine.turn("a1", CONTEXT_A, [90, 91, 92, 93], program="a")
    (before_s,) = engine.deadlines().values()
    flood(engine)
    (after_s,) = engine.deadlines().values()
    assert before_s == pytest.approx(300.0), "memory was free"
    assert after_s < 10.0
    engine.step(seconds=301.0)  # it may go on while memory is free, to max_ttl_s
    engine.turn("a2", [*context, 1, 2, 3], program="a")
    assert savable(engine) == (0, 0.0)
    assert engine.outcomes()[PinOutcome.EXPIRED] == 1


def test_would_be_pins_that_do_not_fit_keep_a_request_waiting(engine):
    engine.turn("a1", CONTEXT_A, [90, 91, 92, 93], program="a")
    pressure = engine.controller.retention.holder.pressure
    assert (pressure().free_blocks, pressure().num_waiting) == (11, 0)
    engine.arrive("c1", list(range(300, 360)), program="c")
    assert engine.admit("c1"), "in the engine it runs"
    assert (pressure().free_blocks, pressure().num_waiting) == (0, 1)
    assert pressure().memory_is_short
    engine.finish("c1")


def test_memory_takes_no_would_be_pin(engine):
    """Nor would it in the order of `adaptive`, where the other program waits."""
    engine.turn("a1", CONTEXT_A, [90, 91, 92, 93], program="a")
    engine.arrive("c1", list(range(300, 360)), program="c")
    assert engine.admit("c1")
    assert not engine.decode("c1", list(range(5))), "the pool is full"
    assert engine.pinned() == {"a": 5}


def test_top_says_what_real_pins_would_have_saved(engine):
    context = engine.turn("a1", CONTEXT_A, [90, 91, 92, 93], program="a")
    flood(engine)
    engine.turn("a2", [*context, 1, 2, 3], program="a")
    told = control.obey(engine.controller, {"do": "programs"}, engine.clock.now_s())
    line = summary_line(told | {"settings": {"policy": "observe"}})
    assert "real ones would have saved up to 20 tokens of prefill, 20 s" in line


def test_nothing_else_may_be_changed_beside_it():
    config = load_config({"policy": "observe"})
    assert ordering_in_force(config) == "request-fcfs"
    assert admission_in_force(config) == "none"
    for key, value in (
        ("ordering", "ttl-aware"),
        ("admission", "room-to-grow"),
        ("lower_tier", "cpu"),
    ):
        with pytest.raises(ConfigError, match=f"'{key}' has value '{value}'"):
            load_config({"policy": "observe", key: value})
