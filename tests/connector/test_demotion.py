"""What becomes of pins above a lower tier, on vLLM's real scheduler."""

import pytest

from tests.connector.conftest import copying, expired_pins, fails, free, pinned, totals
from tests.connector.fake_tier import extra, settle
from ttlcache_connector.tiers.base import TurnEnd

PROMPT = list(range(1, 101))
LONG, OTHER = list(range(600)), list(range(5000, 5600))  # 37 of 63 blocks each
HINTS = {"program_id": "p", "tool": "bash"}
NEVER_PINNED = {"policy": "none", "policy_options": {}}


@pytest.fixture
def make(make_engine, tier):
    return lambda **options: make_engine(extra_config=extra(**options))


@pytest.mark.parametrize(("options", "expires"), [({}, True), (NEVER_PINNED, False)])
def test_an_ended_turn_is_held_until_it_is_copied(make, clock, tier, options, expires):
    engine = make(**options)
    engine.turn("a", PROMPT, hints=HINTS)
    if expires:
        assert pinned(engine) == 6
        assert tier.of("demote") == []
        clock.advance(5.1)
        engine.step()
        assert expired_pins(engine) == 1
    assert tier.of("demote") == ["a"]
    assert pinned(engine) == 0
    assert copying(engine) == 6  # not a pin any more, but not free either
    settle(engine, tier, "a")
    assert copying(engine) == 0
    assert free(engine) == 63


def test_a_claimed_pin_and_an_ended_program_are_forgotten(make, tier):
    engine = make()
    context = engine.turn("a", PROMPT, hints=HINTS)
    engine.turn("b", [*context, 7, 8], hints=HINTS | {"is_last_step": True})
    assert tier.of("arrive-pinned") == ["b"]
    assert tier.of("drop") == ["a", "b"]
    assert tier.of("demote") == []
    assert free(engine) == 63
    assert [t.request_id for t in tier.ends if t.ttl_s is None] == ["b"]
    engine.turn("c", range(200, 300), hints={"program_id": "q"})
    engine.connector.control({"do": "end", "program_id": "q"})
    pinned, program = tier.ends[-2:]
    assert (pinned.request_id, pinned.ttl_s) == ("c", None)
    assert program == TurnEnd(f"end of {pinned.program}", pinned.program)


def test_the_tier_is_told_what_was_decided(make, tier):
    engine = make()
    context = engine.turn("a", PROMPT, hints=HINTS)
    engine.turn("b", [*context, 7, 8], hints=HINTS | {"ttl": "9s"})
    salt = {"cache_salt": "hush"}
    engine.turn("other", range(200, 300), hints={"program_id": "q"}, **salt)
    engine.add("aborted", PROMPT, max_tokens=50)
    engine.step()
    engine.abort("aborted")
    engine.run()
    assert tier.of("drop")[-1] == "aborted"
    policy, wish, other = tier.ends
    assert policy == TurnEnd("a", policy.program, 5.0, is_final=False, tool=("bash",))
    assert wish == TurnEnd("b", policy.program, 9.0, is_final=True, tool=("bash",))
    assert "hush" not in other.program, "a secret of the tenant's"


@pytest.mark.parametrize("ends", [True, False])
def test_a_waiting_request_lets_the_copy_end_but_not_for_ever(make, clock, tier, ends):
    engine = make()
    engine.turn("a", LONG, hints=HINTS)
    clock.advance(5.1)
    engine.add("b", OTHER, hints={"program_id": "q"})
    for _ in range(3):
        engine.step()
    assert "b" not in engine.finished
    assert copying(engine) == 37
    settle(engine, tier, "a") if ends else clock.advance(0.3)
    tier.events.demotions += ["stored", "failed", "stored"]
    engine.run()
    assert "b" in engine.finished
    counted = totals(engine)
    assert (counted["demotions:stored"], counted["demotions:failed"]) == (2, 1)
    assert counted.get("demotions:dropped", 0) == (not ends)


@pytest.mark.parametrize(("demote", "held"), [("on-expiry", 20), ("on-pressure", 0)])
def test_a_running_request_takes_the_memory_at_once(make, clock, demote, held):
    engine = make(demote=demote)
    engine.turn("a", LONG[:320], max_tokens=2, hints=HINTS)
    clock.advance(5.1)
    engine.add("b", OTHER[:400], max_tokens=500, hints={"program_id": "q"})
    engine.step()
    # And "b" grows to 57 of 63.
    assert copying(engine) == held
    engine.run()
    assert engine.finished["b"].num_preemptions == 0


@pytest.mark.parametrize(
    "call", ["match", "update_state_after_alloc", "build_metadata", "report_turn"]
)
def test_a_broken_tier_is_a_miss(make, tier, call, our_log):
    engine = make()
    tier.fails = {call}
    for number in range(3):
        engine.turn(f"r{number}", PROMPT, hints=HINTS)
    assert len(engine.finished) == 3
    counted, *_ = [c for name, c in totals(engine).items() if call in name]
    assert counted >= 1
    assert sum(call in line for line in our_log) == 1


def test_a_promised_load_that_cannot_be_ordered_is_given_up(make, tier):
    engine = make()
    tier.found = 48
    tier.fails = {"update_state_after_alloc"}
    request = engine.add("a", PROMPT, hints=HINTS)
    output = engine.step()
    assert output.kv_connector_metadata.abandoned == {"a"}
    assert request.status.name == "WAITING_FOR_REMOTE_KVS"


def test_one_line_when_the_tier_goes_and_one_when_it_comes_back(make, tier, our_log):
    engine = make()
    for up in (True, False, False, True, True):
        tier.up = up
        engine.turn(f"{len(engine.finished)}", PROMPT, hints={"program_id": "x"})
    assert sum("does not answer" in line for line in our_log) == 1
    assert sum("answers again" in line for line in our_log) == 1
    assert totals(engine)["tier_outages"] == 1
    assert engine.controller.tier_knowledge.reload_source == "cpu"


def test_a_copy_that_cannot_be_ended_keeps_no_other_waiting(make, tier, monkeypatch):
    engine = make(**NEVER_PINNED)
    engine.on_step = None  # a fault is what this is about
    for name, start in (("a", 0), ("b", 1000)):
        engine.turn(name, range(start, start + 100), hints={"program_id": name})
    assert copying(engine) == 12
    expired = engine.role.parts.above_tier.unpinned
    releasable = expired.on_releasable
    monkeypatch.setattr(
        expired,
        "on_releasable",
        lambda each: fails() if each == "a" else releasable(each),
    )
    tier.events.releasable += ["a", "b"]
    engine.role.steps.apply_tier_events()
    assert totals(engine)["hook_errors:apply_tier_events"] == 1
    assert copying(engine) == 6


def test_a_server_that_lost_a_turn_is_blamed(make, clock, tier):
    engine, lost = make(), []
    engine.controller.costs.observe_lost = lambda *told: lost.append(told)
    context = engine.turn("a", PROMPT, hints=HINTS)
    clock.advance(5.1)
    engine.step()
    settle(engine, tier, "a")
    engine.turn("other", range(2000, 3000), hints={"program_id": "q"})  # all memory
    engine.turn("b", [*context, 7, 8], hints=HINTS)
    assert lost == [(len(context) - 1, False)]


@pytest.mark.parametrize(
    ("asked", "heeded"), [(True, True), (False, True), (True, False)]
)
def test_an_answer_counts_if_it_was_asked_for_and_is_heeded(make, tier, asked, heeded):
    engine = make()
    context = engine.turn("a", PROMPT, hints=HINTS)
    tier.asked = asked
    request = engine.add("b", [*context, 7, 8], hints=HINTS)
    request.skip_reading_prefix_cache = not heeded
    engine.step()
    assert engine.controller.requests["b"].asked_tier is (asked and heeded)
