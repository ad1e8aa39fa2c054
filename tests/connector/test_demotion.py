"""What becomes of pins above a lower tier, on vLLM's real scheduler."""

from __future__ import annotations

import pytest

pytest.importorskip("lmcache", reason="the matrix of vLLM versions has no LMCache")

from tests.connector.conftest import demoting, free, pinned, totals
from tests.connector.fake_tier import extra, settle
from ttlcache_connector.tiers.base import TurnEnd

PROMPT = list(range(1, 101))
HINTS = {"program_id": "p", "tool": "bash"}


def test_an_expired_pin_stays_until_its_copy_has_begun(make_engine, clock, tier):
    engine = make_engine(extra_config=extra())
    engine.turn("a", PROMPT, hints=HINTS)
    held = pinned(engine)
    assert held > 0
    clock.advance(5.1)
    engine.step()
    assert totals(engine)["pins:expired"] == 1
    assert tier.of("demote") == ["a"]
    assert pinned(engine) == 0
    assert demoting(engine) == held  # not a pin any more, but not free either
    settle(engine, tier, "a")
    assert demoting(engine) == 0
    assert free(engine) == 63


def test_a_claimed_pin_and_an_ended_program_are_forgotten(make_engine, clock, tier):
    engine = make_engine(extra_config=extra())
    context = engine.turn("a", PROMPT, hints=HINTS)
    engine.turn("b", [*context, 7, 8], hints=HINTS | {"is_last_step": True})
    assert tier.of("arrive-pinned") == ["b"]
    assert tier.of("drop") == ["a", "b"]
    assert tier.of("demote") == []
    assert free(engine) == 63
    assert [t.request_id for t in tier.ends if t.ttl_s is None] == ["b"]
    engine.turn("c", range(200, 300), hints={"program_id": "q"})
    engine.connector.control({"do": "end", "program_id": "q"})
    ended = tier.ends[-1]
    assert (ended.request_id, ended.ttl_s) == ("c", None)
    assert ended.program is not None


def test_a_turn_that_is_not_worth_a_pin_is_copied_at_once(make_engine, clock, tier):
    engine = make_engine(extra_config=extra(policy="none", policy_options={}))
    engine.turn("a", PROMPT, hints=HINTS)
    assert tier.of("demote") == ["a"]
    assert demoting(engine) == len(PROMPT) // 16
    settle(engine, tier, "a")
    assert free(engine) == 63


def test_the_tier_is_told_what_was_decided(make_engine, clock, tier):
    engine = make_engine(extra_config=extra())
    context = engine.turn("a", PROMPT, hints=HINTS)
    engine.turn("b", [*context, 7, 8], hints=HINTS | {"ttl": "9s"})
    engine.turn("other", range(200, 300), hints={"program_id": "q"}, cache_salt="t")
    policy, wish, other = tier.ends
    assert policy == TurnEnd("a", policy.program, 5.0, is_final=False, tool=("bash",))
    assert wish == TurnEnd("b", policy.program, 9.0, is_final=True, tool=("bash",))
    assert other.program != policy.program
    assert "t" not in tier.ends[2].tool


def test_nothing_is_told_or_copied_of_an_aborted_request(make_engine, clock, tier):
    engine = make_engine(extra_config=extra())
    engine.add("a", PROMPT, max_tokens=50, hints=HINTS)
    engine.step()
    engine.abort("a")
    engine.run()
    assert tier.ends == []
    assert tier.of("drop") == ["a"]


@pytest.mark.parametrize("ends", [True, False])
def test_a_waiting_request_lets_the_copy_end_but_not_for_ever(
    make_engine, clock, tier, ends
):
    engine = make_engine(extra_config=extra())
    engine.turn("a", list(range(600)), hints=HINTS)  # 37 of 63 blocks
    clock.advance(5.1)
    engine.add("b", list(range(5000, 5600)), hints={"program_id": "q"})
    for _ in range(3):
        engine.step()
    assert "b" not in engine.finished
    assert demoting(engine) == 37
    settle(engine, tier, "a") if ends else clock.advance(0.3)
    engine.run()
    assert "b" in engine.finished


@pytest.mark.parametrize("demote", ["on-expiry", "on-pressure"])
def test_a_running_request_takes_the_memory_at_once(make_engine, clock, tier, demote):
    engine = make_engine(extra_config=extra(demote=demote))
    engine.turn("a", list(range(320)), max_tokens=2, hints=HINTS)
    clock.advance(5.1)
    engine.add("b", list(range(5000, 5400)), max_tokens=500, hints={"program_id": "q"})
    engine.step()
    # And "b" grows to 57 of 63.
    assert demoting(engine) == (20 if demote == "on-expiry" else 0)
    engine.run()
    assert "b" in engine.finished
    assert engine.finished["b"].num_preemptions == 0


@pytest.mark.parametrize(
    "call", ["match", "allocated", "build_metadata", "report_turn"]
)
def test_a_broken_tier_is_a_miss(make_engine, clock, tier, call, our_log):
    engine = make_engine(extra_config=extra())
    tier.fails = {call}
    for number in range(3):
        engine.turn(f"r{number}", PROMPT, hints=HINTS)
    assert len(engine.finished) == 3
    counted = [c for name, c in totals(engine).items() if call in name]
    assert counted
    assert counted[0] >= 1
    assert sum(call in line for line in our_log) == 1


def test_a_promised_load_that_cannot_be_ordered_is_given_up(make_engine, clock, tier):
    engine = make_engine(extra_config=extra())
    tier.found = (48, True)
    tier.fails = {"allocated"}
    request = engine.add("a", PROMPT, hints=HINTS)
    output = engine.step()
    assert output.kv_connector_metadata.abandoned == {"a"}
    assert request.status.name == "WAITING_FOR_REMOTE_KVS"


def test_one_line_when_the_tier_goes_and_one_when_it_comes_back(
    make_engine, clock, tier, our_log
):
    engine = make_engine(extra_config=extra())
    for up in (True, False, False, True, True):
        tier.up = up
        engine.turn(f"{len(engine.finished)}", PROMPT, hints={"program_id": "x"})
    assert sum("does not answer" in line for line in our_log) == 1
    assert sum("answers again" in line for line in our_log) == 1
    assert totals(engine)["tier_outages"] == 1
    assert engine.controller.tier.source == "cpu"


def test_room_that_cannot_be_made_costs_no_request(make_engine, tier, monkeypatch):
    engine = make_engine(extra_config=extra(demote="on-pressure"))
    engine.on_step = None  # a fault is what this is about

    def broken(*_, **__):
        raise RuntimeError("start_copies_ahead")

    expired = engine.role.parts.demoting.expired
    monkeypatch.setattr(expired, "start_copies_ahead", broken)
    assert len(engine.turn("a", PROMPT, hints=HINTS)) > len(PROMPT)
    assert totals(engine)["hook_errors:start_copies_ahead"] > 0


def test_one_copy_that_cannot_be_settled_keeps_no_other_waiting(
    make_engine, clock, tier, monkeypatch
):
    engine = make_engine(extra_config=extra(policy="none", policy_options={}))
    engine.on_step = None  # a fault is what this is about
    for name, start in (("a", 0), ("b", 1000)):
        prompt = list(range(start, start + 100))
        engine.turn(name, prompt, hints={"program_id": name})
    assert demoting(engine) == 12
    role = engine.role
    settled = role.parts.demoting.expired.on_settled

    def fail_once(request_id):
        if request_id == "a":
            raise RuntimeError("broken")
        return settled(request_id)

    monkeypatch.setattr(role.parts.demoting.expired, "on_settled", fail_once)
    tier.events.settled += ["a", "b"]
    role.steps.tier_events()
    assert totals(engine)["hook_errors:tier_events"] == 1
    assert demoting(engine) == 6


def test_how_demotions_ended_is_counted(make_engine, clock, tier):
    engine = make_engine(extra_config=extra())
    engine.turn("a", list(range(600)), hints=HINTS)
    clock.advance(5.1)
    engine.add("b", list(range(5000, 5600)), hints={"program_id": "q"})
    engine.step()
    clock.advance(0.3)
    tier.events.demotions += ["stored", "failed", "stored"]
    engine.run()
    counted = totals(engine)
    assert counted["demotions:stored"] == 2
    assert counted["demotions:failed"] == counted["demotions:dropped"] == 1


@pytest.mark.parametrize("blamed", [True, False])
def test_a_server_that_took_anothers_place_is_not_blamed(
    make_engine, clock, tier, blamed
):
    engine = make_engine(extra_config=extra())
    costs = engine.controller.costs
    lost = []
    costs.observe_lost = lambda *told: lost.append(told)
    context = engine.turn("a", PROMPT, hints=HINTS)
    clock.advance(5.1)
    engine.step()
    settle(engine, tier, "a")
    engine.turn("other", range(2000, 3000), hints={"program_id": "q"})  # all memory
    if not blamed:
        tier.generation += 1
    engine.turn("b", [*context, 7, 8], hints=HINTS)
    assert lost == ([(len(context) - 1, False)] if blamed else [])


@pytest.mark.parametrize(
    ("asked", "heeded"), [(True, True), (False, True), (True, False)]
)
def test_an_answer_tells_something_where_one_was_asked_for_and_is_heeded(
    make_engine, clock, tier, asked, heeded
):
    engine = make_engine(extra_config=extra())
    context = engine.turn("a", PROMPT, hints=HINTS)
    tier.asked = asked
    request = engine.add("b", [*context, 7, 8], hints=HINTS)
    request.skip_reading_prefix_cache = not heeded
    engine.step()
    record = engine.controller.requests["b"]
    assert record.asked_tier is (asked and heeded)
