"""Turns past their time: they stay until somebody needs their memory."""

from __future__ import annotations

import pytest

pytest.importorskip("lmcache", reason="the matrix of vLLM versions has no LMCache")

from tests.connector.conftest import demoting, free, pinned, totals
from tests.connector.fake_tier import extra
from ttlcache_connector.lingering import room_blocks

HINTS = {"program_id": "p", "tool": "bash"}
LONG = list(range(600))  # 37 of 63 blocks
OTHER = list(range(5000, 5600))


def lingers(**options):
    return extra(linger=True, **options)


def lingering(engine):
    return engine.connector.side.ledger.lingering_blocks


def expired(make_engine, clock, prompt=LONG, **options):
    """An engine in which the turn "a" of program "p" lingers, and its tokens."""
    engine = make_engine(extra_config=lingers(**options))
    context = engine.turn("a", prompt, hints=HINTS)
    clock.advance(5.1)
    engine.step()
    return engine, context


def test_an_expired_turn_stays_and_is_not_copied(make_engine, clock, tier):
    engine, _ = expired(make_engine, clock)
    assert totals(engine)["pins:expired"] == 1
    assert pinned(engine) == 0
    assert lingering(engine) == 37
    assert tier.of("demote") == []
    # What only lingers counts as free for every decision.
    assert engine.connector.side.ledger.pressure().free_blocks == 63


def test_a_turn_without_a_pin_lingers(make_engine, clock, tier):
    engine = make_engine(extra_config=lingers(policy="none", policy_options={}))
    engine.turn("a", LONG, hints=HINTS)
    assert lingering(engine) == 37
    assert engine.connector.side.ledger.pressure().free_blocks == 63
    assert tier.of("demote") == []


def test_who_returns_finds_it_and_nothing_was_copied(make_engine, clock, tier):
    engine, context = expired(make_engine, clock)
    engine.add("b", [*context, 7, 8], hints=HINTS)
    engine.step()
    assert engine.connector.side.controller.requests["b"].cached_tokens == 592
    engine.run()
    assert tier.of("demote") == []
    assert tier.of("forget") == ["a"]  # "b" has it all, and more
    assert lingering(engine) == 0
    assert pinned(engine) == 38


def test_who_returns_with_another_context_leaves_it(make_engine, clock, tier):
    engine, _ = expired(make_engine, clock, prompt=LONG[:320])
    engine.turn("b", list(range(9000, 9100)), hints=HINTS)
    assert lingering(engine) == 20
    assert tier.of("forget") == []


def test_it_goes_down_when_a_waiting_request_needs_the_room(make_engine, clock, tier):
    engine, _ = expired(make_engine, clock)
    engine.add("b", OTHER, hints={"program_id": "q"})
    engine.step()
    assert tier.of("demote") == ["a"]
    assert "b" not in engine.finished
    assert demoting(engine) == 37
    tier.copy("a")
    engine.run()
    assert "b" in engine.finished


def test_room_for_the_next_step_is_made_ahead(make_engine, clock, tier):
    engine, _ = expired(make_engine, clock)
    engine.add("b", OTHER[:350], max_tokens=40, hints={"program_id": "q"})
    while free(engine) >= room_blocks(63, 8192, [16]):
        assert tier.of("demote") == []
        engine.step()
    engine.step()
    assert tier.of("demote") == ["a"]
    assert free(engine) > 0


def test_the_oldest_goes_first_and_no_more_than_is_needed(make_engine, clock, tier):
    engine = make_engine(extra_config=lingers())
    for number in range(3):
        prompt = list(range(1000 * number, 1000 * number + 272))
        engine.turn(f"r{number}", prompt, hints={"program_id": f"p{number}"})
    clock.advance(5.1)
    engine.step()
    assert lingering(engine) == 3 * 17
    engine.add("new", OTHER[:320], hints={"program_id": "q"})
    engine.step()
    assert tier.of("demote") == ["r0"]


def test_a_program_that_waits_goes_last(make_engine, clock, tier):
    engine = make_engine(extra_config=lingers(), max_num_seqs=1)
    contexts = [
        engine.turn(
            f"r{n}", range(1000 * n, 1000 * n + 320), hints={"program_id": f"p{n}"}
        )
        for n in range(2)
    ]
    clock.advance(5.1)
    engine.step()
    engine.add("run", OTHER[:16], max_tokens=30, hints={"program_id": "q"})
    engine.step()
    engine.add("back", [*contexts[0], 5], hints={"program_id": "p0"})
    engine.connector.side.ledger.relieve(15, at_once=False)
    assert tier.of("demote") == ["r1"]


def test_an_ended_program_is_not_copied(make_engine, clock, tier):
    engine, _ = expired(make_engine, clock)
    engine.connector.side.control({"do": "end", "program_id": "p"})
    engine.add("b", OTHER, hints={"program_id": "q"})
    engine.run()
    assert tier.of("demote") == []
    assert "a" in tier.of("forget")
    assert "b" in engine.finished


def test_running_requests_take_it_at_once(make_engine, clock, tier):
    engine, _ = expired(make_engine, clock, prompt=LONG[:320], demote_wait_s=10.0)
    engine.add("b", OTHER[:400], max_tokens=500, hints={"program_id": "q"})
    engine.run()
    assert engine.finished["b"].num_preemptions == 0


def test_a_victim_is_copied_before_a_waiting_request_gets_its_memory(
    make_engine, clock, tier
):
    engine = make_engine(extra_config=lingers(demote_wait_s=10.0))
    engine.turn("old", OTHER[:160], hints={"program_id": "q"})
    engine.turn("a", LONG, hints=HINTS)
    engine.add("run", range(7000, 7016), max_tokens=100, hints={"program_id": "r"})
    engine.step()
    engine.add("b", [*OTHER[:160], *range(9000, 9400)], hints={"program_id": "q"})
    engine.step()
    assert tier.of("demote") == ["a"]
    assert demoting(engine) > 0
    assert engine.scheduler.requests["b"].num_computed_tokens == 0
    tier.copy("a")
    engine.run()
    assert "b" in engine.finished


@pytest.mark.parametrize(("given_up", "copied"), [(7, []), (8, ["a"])])
def test_a_pin_that_gives_up_a_short_tail_is_not_copied_for_it(
    make_engine, clock, tier, given_up, copied
):
    engine = make_engine(extra_config=lingers())
    engine.turn("a", LONG, hints=HINTS)
    side = engine.connector.side
    (pin,) = side.controller.pins
    with side.ledger.copying_first():
        shrunk = side.ledger.shrink(pin.pin_id, given_up)
    side.controller.pins.shrink(
        pin, kv_blocks=shrunk.kept_blocks, kv_tokens=shrunk.kept_tokens
    )
    assert (shrunk.freed_blocks, shrunk.kept_blocks) == (given_up, 37 - given_up)
    assert tier.of("demote") == copied
    # The tail of what is copied stays until its copy begins.
    assert demoting(engine) == (given_up if copied else 0)
    tier.copy("a")
    assert free(engine) == 63 - 37 + given_up
    engine.step()


def test_a_pin_that_is_below_gives_up_its_tail_at_once(make_engine, clock, tier):
    engine = make_engine(extra_config=lingers())
    engine.turn("a", LONG, hints=HINTS)
    tier.copy("a")
    side = engine.connector.side
    (pin,) = side.controller.pins
    with side.ledger.copying_first():
        assert side.ledger.shrink(pin.pin_id, 30).freed_blocks == 30
    assert tier.of("demote") == []


def test_a_tier_that_went_down_gets_nothing(make_engine, clock, tier):
    engine, _ = expired(make_engine, clock)
    tier.up = False
    engine.add("b", OTHER, hints={"program_id": "q"})
    engine.run()
    assert "b" in engine.finished
    assert lingering(engine) == demoting(engine) == 0


@pytest.mark.parametrize("how", ["reset", "drop"])
def test_nothing_stays_behind(make_engine, clock, tier, how):
    engine, _ = expired(make_engine, clock)
    if how == "reset":
        assert engine.scheduler.reset_prefix_cache()
    else:
        engine.connector.side.drop_rest()
    assert lingering(engine) == 0
    assert free(engine) == 63
    assert engine.connector.side.ledger.references() == {}


@pytest.mark.parametrize(
    ("pool", "step", "sizes", "expected"),
    [(24_000, 8192, [16], 512), (63, 8192, [16], 7), (1000, 100, [16, 32], 11)],
)
def test_room_is_what_a_step_may_take_but_a_part_of_the_pool(
    pool, step, sizes, expected
):
    assert room_blocks(pool, step, sizes) == expected
