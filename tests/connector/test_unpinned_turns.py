"""Turns past their time: they stay until somebody needs their memory."""

import math

import pytest

from tests.connector.conftest import copying, expired_pins, fails, free, pinned
from tests.connector.fake_tier import copy, extra
from ttlcache_connector import faults

HINTS = {"program_id": "p", "tool": "bash"}
LONG = list(range(600))  # 37 of 63 blocks
OTHER = list(range(5000, 5600))
NEVER_PINNED = {"policy": "none", "policy_options": {}}


@pytest.fixture
def make(make_engine, tier):
    """Engines above the tier, which copies when memory is short."""

    def make(num_blocks=64, max_num_seqs=16, **options):
        config = extra(**{"demote": "on-pressure", **options})
        return make_engine(
            num_blocks=num_blocks, max_num_seqs=max_num_seqs, extra_config=config
        )

    return make


def expired_turns(engine):
    return engine.role.parts.above_tier.unpinned


def cached(engine):
    return expired_turns(engine).lingering_blocks


@pytest.fixture
def expired(make, clock):
    """An engine in which the turn "a" of program "p" is cached, and its tokens."""

    def make_expired(prompt=LONG, **options):
        engine = make(**options)
        context = engine.turn("a", prompt, hints=HINTS)
        clock.advance(5.1)
        engine.step()
        return engine, context

    return make_expired


@pytest.mark.parametrize("options", [{}, NEVER_PINNED], ids=["expired", "no pin"])
def test_a_turn_without_a_pin_stays_and_is_not_copied(expired, tier, options):
    engine, _ = expired(**options)
    assert expired_pins(engine) == (not options)
    assert pinned(engine) == 0
    assert cached(engine) == 37
    assert tier.of("demote") == []
    # What is only cached counts as free for every decision.
    assert engine.holder.pressure().free_blocks == 63


def test_nothing_is_kept_for_a_tier_turned_off(expired, clock, tier, monkeypatch):
    monkeypatch.setattr(faults, "MAX_FAULTS", 3)
    engine, _ = expired()
    tier.fails = {"match"}
    for number in range(3):
        engine.turn(f"b-{number}", [9000 + number] * 20, hints={"is_last_step": True})
    assert tier.is_off
    engine.turn("c", OTHER, hints={"program_id": "q"})
    clock.advance(5.1)
    engine.step()
    assert pinned(engine) == 0
    assert tier.of("demote") == ["a"]  # it made room for "c", without a copy
    assert cached(engine) == 0
    assert free(engine) == 63


def test_who_returns_finds_it_and_nothing_was_copied(expired, tier):
    engine, context = expired()
    engine.add("b", [*context, 7, 8], hints=HINTS)
    assert engine.step().num_scheduled_tokens["b"] == len(context) + 2 - 592
    engine.run()
    assert tier.of("demote") == []
    assert tier.of("drop") == ["a"]  # "b" has it all, and more
    assert cached(engine) == 0
    assert pinned(engine) == 38


def test_who_returns_with_another_context_leaves_it(expired, tier):
    engine, _ = expired(LONG[:320])
    engine.turn("b", list(range(9000, 9100)), hints=HINTS)
    assert cached(engine) == 20
    assert tier.of("drop") == []


def test_a_program_that_waits_goes_last(make, clock, tier):
    engine = make(max_num_seqs=1, **NEVER_PINNED)
    context = engine.turn("r0", LONG[:320], hints={"program_id": "p0"})
    engine.turn("r1", OTHER[:320], hints={"program_id": "p1"})
    engine.add("run", range(9000, 9016), max_tokens=30, hints={"program_id": "q"})
    engine.step()
    engine.add("back", [*context, 5], hints={"program_id": "p0"})
    expired_turns(engine).free(15, at_once=False)
    assert tier.of("demote") == ["r1"]


def test_a_victim_is_copied_before_a_waiting_request_gets_its_memory(make, tier):
    engine = make()
    engine.turn("old", OTHER[:160], hints={"program_id": "q"})
    engine.turn("a", LONG, hints=HINTS)
    engine.add("run", range(7000, 7016), max_tokens=100, hints={"program_id": "r"})
    engine.step()
    engine.add("b", [*OTHER[:160], *range(9000, 9400)], hints={"program_id": "q"})
    engine.step()
    assert tier.of("demote") == ["a"]
    assert copying(engine) > 0
    assert engine.scheduler.requests["b"].num_computed_tokens == 0
    copy(engine, tier, "a")
    engine.run()
    assert "b" in engine.finished


@pytest.mark.parametrize("demote", ["on-expiry", "on-pressure"])
def test_a_tier_that_went_down_gets_nothing(expired, tier, demote):
    tier.up = demote == "on-pressure"  # it goes down before or after the pin expires
    engine, _ = expired(demote=demote)
    assert pinned(engine) == 0
    tier.up = False
    engine.add("b", OTHER, hints={"program_id": "q"})
    engine.run()
    assert "b" in engine.finished
    assert cached(engine) == copying(engine) == 0


# --- what others share, and what fails ---------------------------------------------


def steps_until_memory(engine, request_id, tier):
    """Copies end at once."""
    for number in range(60):
        if engine.scheduler.requests[request_id].num_computed_tokens:
            return number
        engine.step()
        for copied in list(expired_turns(engine)._awaited):
            copy(engine, tier, copied)
    raise AssertionError("never")


def behind_one_prompt(engine, programs, own_tokens):
    """Turns of several programs: 20 blocks are the same, the others their own."""
    for n in range(programs):
        own = range(9000 + 100 * n, 9000 + 100 * n + own_tokens)
        engine.turn(f"r{n}", [*LONG[:320], *own], hints={"program_id": f"p{n}"})


def test_blocks_that_several_share_are_free_once(make):
    engine = make(**NEVER_PINNED)
    behind_one_prompt(engine, 3, own_tokens=16)
    assert cached(engine) == 3 * 21
    # Three tails; their common head is counted by none, for it stays with the others.
    assert engine.holder.pressure().free_blocks <= free(engine) + 20 + 3


def test_room_among_turns_that_share_a_prefix_is_made_at_once(make, tier):
    engine = make(**NEVER_PINNED)
    behind_one_prompt(engine, 10, own_tokens=32)
    engine.add("b", OTHER[:592], hints={"program_id": "q"})
    assert steps_until_memory(engine, "b", tier) <= 3


def test_equal_turns_do_not_pile_up(make, tier):
    """A probe, or short questions below one system prompt."""
    engine = make(**NEVER_PINNED)
    for n in range(40):
        hints = {"program_id": f"p{n}"}
        engine.turn(f"r{n}", LONG[:330], hints=hints, max_tokens=1)
        copy(engine, tier, f"r{n}") if n else None
    assert cached(engine) == 20


def test_who_finds_free_blocks_is_not_let_in_victim_by_victim(make, tier):
    engine = make(401, policy_options={"ttl_s": 1000.0}, max_ttl_s=1000.0)
    old = engine.turn("old", range(32), hints={"program_id": "oldest"}, max_tokens=1)
    prompt = [*old, *range(100, 3267)]
    context = engine.turn("first", prompt, hints={"program_id": "over"})
    engine.connector.control({"do": "end", "program_id": "over"})
    for n in range(10):
        prompt = range(10_000 * (n + 1), 10_000 * (n + 1) + 320)
        engine.turn(f"r{n}", prompt, hints={"program_id": f"p{n}"})
    engine.add("run", range(7000, 7016), max_tokens=1000, hints={"program_id": "r"})
    engine.step()
    prompt = [*context, *range(500_000, 502_200)]
    engine.add("b", prompt, hints={"program_id": "oldest"})
    assert steps_until_memory(engine, "b", tier) <= 3
    assert len(tier.of("demote")) > 3


@pytest.mark.parametrize("when", ["expiry", "room", "victim"])
def test_a_tier_that_raises_keeps_no_memory(make, clock, tier, when):
    engine = make(demote="on-pressure" if when == "room" else "on-expiry")
    engine.on_step = None  # the faults are counted
    engine.turn("a", LONG, hints=HINTS)
    well, tier.demote = tier.demote, fails
    if when != "victim":
        clock.advance(5.1)
        engine.step()
    if when != "expiry":
        engine.add("b", OTHER, hints={"program_id": "q"})
        engine.step()
        engine.abort("b")
    tier.demote = well
    engine.step()
    engine.role.teardown.release_all()
    assert free(engine) == 63
    assert engine.scheduler.reset_prefix_cache()


def test_a_request_that_is_unknown_to_us_leaves_nothing_to_copy(make, tier):
    engine = make()
    engine.on_step = None
    engine.add("a", LONG, hints=HINTS)
    engine.step()
    engine.controller.requests.pop("a")
    engine.run()
    assert tier.of("drop") == ["a"]


def test_nothing_is_looked_for_behind_a_pinned_turn(make, clock, tier):
    """Nobody can have stored what was never computed."""
    engine = make()
    context = engine.turn("a", LONG, hints=HINTS)
    assert tier.lookup_limit_tokens == math.inf, "the first turn of a program"
    later = engine.turn("b", [*context, 1, 2, 3], hints=HINTS)
    assert tier.lookup_limit_tokens == (len(context) - 1) // 16 * 16
    engine.turn("c", OTHER[:50], hints={"program_id": "q"})
    assert tier.lookup_limit_tokens == math.inf
    clock.advance(5.1)
    engine.step()  # the pin of "b" expires
    engine.turn("d", [*later, 1, 2, 3], hints=HINTS)
    assert tier.lookup_limit_tokens == math.inf, "of its tail some may be below"
