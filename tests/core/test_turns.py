"""Open turns: retries, rewritten histories, sub-agents and their parents."""

from __future__ import annotations

import math

import pytest

from ttlcache.controller import Controller
from ttlcache.estimators.costs import CostModel
from ttlcache.programs.model import MAX_OPEN_TURNS
from ttlcache.testing import FakeEngine
from ttlcache.types import PinOutcome

TTL_S = 10.0
PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]  # two full blocks and a half


def make_engine(pool_blocks=64, *, whole_pins=False, second_per_token=None, **config):
    settings = {"policy": "fixed", "policy_options": {"ttl_s": TTL_S}, **config}
    engine = FakeEngine(
        settings, pool_blocks=pool_blocks, block_tokens=4, whole_pins=whole_pins
    )
    if second_per_token is not None:
        engine.controller = Controller(
            engine.controller.config,
            engine.clock,
            engine.holder,
            block_tokens=4,
            costs=CostModel({"prefill": [second_per_token, 0, 0]}),
        )
    return engine


def outcomes(engine):
    """How many pins ended how."""
    totals = engine.controller.telemetry.metrics.totals
    return {label: n for (name, label), n in totals.items() if name == "pins"}


def pins(engine):
    return list(engine.controller.pins)


def gaps(engine):
    return engine.controller.telemetry.metrics.observations.get("gap_seconds", [])


def program_of(engine, label):
    return engine.controller.programs.get(("", label))


# --- a retry holds the same pin ------------------------------------------------


def test_a_retry_holds_the_pin_that_its_first_try_holds():
    # Scenario:
    #   1. r2 waits for memory and holds the pin of r1.
    #   2. Its client gives up too early and sends the same again: r3.
    #   3. Only then r2 is aborted. r3 claims the pin.
    engine = make_engine()
    context = engine.turn("r1", PROMPT, [11, 12, 13], program="A")
    engine.step(seconds=3.0)
    engine.arrive("r2", context, program="A")
    engine.arrive("r3", context, program="A")
    (pin,) = pins(engine)
    assert pin.waiters == {"r2", "r3"}
    engine.check()
    engine.abort("r2")
    engine.check()
    assert engine.admit("r3")
    assert outcomes(engine) == {PinOutcome.CLAIMED: 1}
    assert engine.controller.telemetry.metrics.totals["claimed_tokens", ""] == 12
    assert gaps(engine) == [3.0]  # the gap ended once, with the first try
    engine.check()


def test_the_first_to_claim_takes_the_pin_from_the_others():
    engine = make_engine()
    context = engine.turn("r1", PROMPT, [11, 12, 13], program="A")
    engine.arrive("r2", [*context, 5], program="A")
    engine.arrive("r3", [*context, 6], program="A")
    with_pin = engine.controller.queue.priority("r3")
    assert engine.admit("r2")
    assert outcomes(engine) == {PinOutcome.CLAIMED: 1}
    assert sorted(engine.rekeyed) == ["r2", "r3"]
    assert engine.controller.queue.priority("r3") > with_pin
    assert engine.admit("r3")  # its blocks are there: no loss
    assert engine.controller.telemetry.metrics.totals["evicted_returns", ""] == 0
    engine.check()


def test_the_first_holder_is_aborted_after_the_deadline_while_a_retry_waits():
    engine = make_engine()
    context = engine.turn("r1", PROMPT, program="A")
    engine.arrive("r2", context, program="A")
    engine.arrive("r3", context, program="A")
    engine.step(seconds=5 * TTL_S)
    engine.abort("r2")
    engine.step()
    assert len(pins(engine)) == 1
    engine.check()
    assert engine.admit("r3")
    assert outcomes(engine) == {PinOutcome.CLAIMED: 1}


def test_when_all_holders_are_gone_the_deadline_counts_again():
    engine = make_engine()
    context = engine.turn("r1", PROMPT, program="A")
    for request_id in ("r2", "r3"):
        engine.arrive(request_id, context, program="A")
    engine.step(seconds=5 * TTL_S)
    for request_id in ("r2", "r3"):
        engine.abort(request_id)
    engine.step()
    assert outcomes(engine) == {PinOutcome.EXPIRED: 1}
    assert program_of(engine, "A").open_turns == []
    # Whoever comes now continues nothing: its wait is no lost return's.
    engine.turn("r4", context, program="A")
    assert len(gaps(engine)) == 1
    engine.check()


def test_a_claimed_turn_is_over_and_a_second_branch_of_it_is_new():
    engine = make_engine()
    context = engine.turn("r1", PROMPT, [11, 12, 13], program="A")
    engine.arrive("r2", [*context, 5], program="A")
    engine.admit("r2")
    record = engine.arrive("r3", [*context, 6], program="A")
    assert (record.pin_id, record.reusable_tokens) == (None, 0)
    assert len(gaps(engine)) == 1


def test_a_program_that_ends_lets_all_waiting_retries_claim_or_go():
    engine = make_engine()
    context = engine.turn("r1", PROMPT, program="A")
    engine.arrive("r2", context, program="A")
    engine.arrive("r3", context, program="A")
    engine.controller.end("", "A")
    engine.abort("r2")
    assert len(pins(engine)) == 1
    engine.check()
    engine.abort("r3")
    assert outcomes(engine) == {PinOutcome.ENDED: 1}
    assert engine.holder.free_blocks == 64


def test_turns_that_somebody_waits_for_do_not_count_against_the_bound():
    # Scenario: one turn is held; as many as the bound allows finish after it, and
    # one more. The oldest that nobody waits for gives way, not the held one.
    engine = make_engine(pool_blocks=512)
    context = engine.turn("held", [7] * 9, program="A")
    engine.arrive("waits", [*context, 1, 1], program="A")
    for number in range(MAX_OPEN_TURNS + 1):
        engine.turn(f"r{number}", [100 + number] * 9, program="A")
        engine.check()
    assert outcomes(engine) == {PinOutcome.SUPERSEDED: 1}
    assert len(pins(engine)) == MAX_OPEN_TURNS + 1
    assert engine.admit("waits")
    assert outcomes(engine) == {PinOutcome.SUPERSEDED: 1, PinOutcome.CLAIMED: 1}


# --- rewritten histories -------------------------------------------------------


def test_a_rewrite_of_an_unpinned_turn_closes_its_gap():
    # Scenario: the pin has expired, and with it the hashes; the agent comes back
    # with a summary of its history. The gap ended; that nothing was hit is not
    # the engine's fault.
    engine = make_engine()
    engine.turn("r1", PROMPT, program="A")
    engine.step(seconds=TTL_S)
    record = engine.arrive("r2", [90, 91, 92, 93, 94], program="A")
    assert gaps(engine) == [TTL_S]
    assert len(engine.controller.gaps._open) == 0
    assert (record.pin_id, record.reusable_tokens) == (None, 0)
    assert program_of(engine, "A").reuse_share == 1.0  # nobody knows what it shared
    engine.admit("r2")
    assert engine.controller.telemetry.metrics.totals["evicted_returns", ""] == 0
    engine.check()


def test_a_retry_that_rewrites_what_cannot_be_shortened_ends_the_pin():
    # Scenario: r2 continues r1 and is aborted; the retry is a rewritten prompt,
    # and this holder cannot shorten a pin.
    engine = make_engine(whole_pins=True)
    context = engine.turn("r1", PROMPT, [*range(11, 24)], program="A")
    engine.arrive("r2", context, program="A")
    engine.abort("r2")
    record = engine.arrive("r3", [*PROMPT[:8], 90, 91], program="A")
    assert outcomes(engine) == {PinOutcome.SUPERSEDED: 1}
    assert (record.pin_id, record.reusable_tokens) == (None, 8)
    assert program_of(engine, "A").open_turns == []
    engine.check()


def test_a_retry_of_a_rewritten_prompt_shortens_the_pin_no_further():
    engine = make_engine()
    engine.turn("r1", PROMPT, [*range(11, 24)], program="A")
    rewritten = [*PROMPT[:8], 90, 91, 92, 93, 94]
    for request_id in ("r2", "r3"):
        engine.arrive(request_id, rewritten, program="A")
        assert [pin.kv_blocks for pin in pins(engine)] == [2]
        engine.abort(request_id)
        engine.check()


def test_shares_are_learnt_half_of_the_way_each_time():
    # 2 of 5 blocks shared: 1 + (0.4 - 1) / 2 = 0.7; then a plain continuation.
    engine = make_engine()
    engine.turn("r1", PROMPT, [*range(11, 24)], program="A")
    context = engine.turn("r2", [*PROMPT[:8], 90, 91, 92], program="A")
    assert program_of(engine, "A").reuse_share == pytest.approx(0.7)
    engine.turn("r3", context, program="A")
    assert program_of(engine, "A").reuse_share == pytest.approx(0.85)


# --- sub-agents under their own id ---------------------------------------------


def test_a_parent_is_awaited_long_enough_when_its_sub_agent_ends():
    # Scenario, with a second of prefill per token:
    #   1. The parent's turn starts a sub-agent and is pinned until 10 s.
    #   2. The child runs from 1 s and ends at 9 s, too late for that deadline.
    #   3. The parent has 11 tokens: it is held for 11 s from there.
    engine = make_engine(second_per_token=1.0)
    context = engine.turn("p1", PROMPT, program="P", tool="Task")
    engine.turn("other", [50] * 9, program="O", tool="bash")
    engine.step(seconds=1.0)
    engine.arrive("c1", [80] * 9, program="C", parent_id="P", is_last_step=True)
    engine.admit("c1")
    engine.step(seconds=8.0)
    engine.finish("c1")
    deadlines = {pin.program.program_id: pin.deadline_s for pin in pins(engine)}
    assert deadlines == {"P": 20.0, "O": 10.0}
    engine.step(seconds=10.9)
    engine.turn("p2", context, program="P")
    assert outcomes(engine) == {PinOutcome.CLAIMED: 1, PinOutcome.EXPIRED: 1}
    engine.check()


def test_renewing_never_shortens_and_is_capped():
    engine = make_engine(second_per_token=1.0, max_ttl_s=4.0)
    engine.turn("p1", PROMPT, program="P", tool="Task")
    engine.step(seconds=3.0)
    engine.turn("c1", [80] * 9, program="C", parent_id="P", is_last_step=True)
    assert [pin.deadline_s for pin in pins(engine)] == [7.0]  # not 3 + 11
    engine = make_engine(second_per_token=1e-3)
    engine.turn("p1", PROMPT, program="P", tool="Task")
    engine.turn("c1", [80] * 9, program="C", parent_id="P", is_last_step=True)
    assert [pin.deadline_s for pin in pins(engine)] == [TTL_S]


@pytest.mark.parametrize("tool", ["bash", "ask_user"])
def test_only_a_turn_that_waits_for_sub_agents_is_renewed(tool):
    engine = make_engine(second_per_token=1.0)
    engine.turn("p1", PROMPT, program="P", tool=tool)
    engine.step(seconds=9.0)
    engine.turn("c1", [80] * 9, program="C", parent_id="P", is_last_step=True)
    assert [pin.deadline_s for pin in pins(engine)] == [TTL_S]


def test_a_parent_whose_pin_is_gone_or_that_ended_is_left_in_peace():
    engine = make_engine(second_per_token=1.0)
    engine.turn("p1", PROMPT, program="P", tool="Task")
    for child in ("C", "D"):
        engine.turn(f"{child}1", [80] * 9, program=child, parent_id="P")
    engine.controller.memory.release_all()
    engine.controller.end("", "C")
    engine.controller.end("", "P")
    engine.controller.end("", "D")
    assert pins(engine) == []
    engine.check()


def test_the_parent_of_a_nested_sub_agent_is_the_one_renewed():
    engine = make_engine(second_per_token=1.0)
    engine.turn("p1", PROMPT, program="P", tool="Task")
    engine.turn("c1", [80] * 9, program="C", parent_id="P", tool="Task")
    engine.step(seconds=9.0)
    engine.turn("g1", [90] * 9, program="G", parent_id="C", is_last_step=True)
    deadlines = {pin.program.program_id: pin.deadline_s for pin in pins(engine)}
    assert deadlines == {"P": 10.0, "C": 19.0}  # 9 + 10 tokens
    engine.controller.end("", "C")
    deadlines = {pin.program.program_id: pin.deadline_s for pin in pins(engine)}
    assert deadlines == {"P": 20.0}


def test_a_sub_agent_stands_where_a_newcomer_stands():
    engine = make_engine()
    for label in "PQ":
        engine.arrive(label, PROMPT, program=label)
    engine.arrive("C", PROMPT, program="C", parent_id="P")
    engine.arrive("R", PROMPT, program="R")
    order = sorted("PQRC", key=engine.controller.queue.priority)
    assert order == ["P", "Q", "C", "R"]


def test_a_parent_is_found_inside_the_tenant_once_and_for_all():
    engine = make_engine()
    for label in "PQ":
        engine.turn(label, PROMPT, program=label)
    engine.turn("x", PROMPT, program="X", tenant="other", parent_id="P")
    assert engine.controller.programs.get(("other", "X")).parent is None
    engine.turn("c1", [80] * 9, program="C", parent_id="nobody")
    assert program_of(engine, "C").parent is None
    engine.turn("c2", [80] * 9, program="C", parent_id="P")
    engine.turn("c3", [80] * 9, program="C", parent_id="Q")
    assert program_of(engine, "C").parent is program_of(engine, "P")


def test_nobody_is_its_own_parent_or_its_parents_parent():
    engine = make_engine()
    engine.turn("a", PROMPT, program="A", parent_id="A")
    assert program_of(engine, "A").parent is None
    engine.turn("b", PROMPT, program="B", parent_id="A")
    engine.turn("a2", PROMPT, program="A", parent_id="B")
    assert program_of(engine, "A").parent is None
    assert program_of(engine, "B").parent is program_of(engine, "A")
    for label in "AB":
        engine.controller.end("", label)
    engine.check()


def test_chains_of_sub_agents_do_not_keep_their_ancestors_in_memory():
    engine = make_engine()
    engine.turn("a", PROMPT, program="A")
    engine.turn("b", [80] * 9, program="B", parent_id="A")
    b = program_of(engine, "B")
    engine.controller.end("", "B")
    assert b.parent is None


# --- the sweep -----------------------------------------------------------------


def test_programs_end_idle_by_silence_and_forgotten_by_number():
    engine = make_engine(program_idle_s=60.0)
    engine.controller.programs.max_programs = 2
    for number in range(3):
        engine.turn(f"r{number}", [100 + number] * 9, program=str(number))
    engine.step(seconds=60.0)
    ended = engine.controller.telemetry.metrics.totals
    assert (ended["programs_ended", "forgotten"], ended["programs_ended", "idle"]) == (
        1,
        0,
    )
    engine.step(seconds=0.1)
    assert (ended["programs_ended", "forgotten"], ended["programs_ended", "idle"]) == (
        1,
        2,
    )


def test_a_gap_that_nobody_ended_is_learnt_as_endless():
    engine = make_engine()
    engine.turn("r1", PROMPT, program="A")
    engine.step(seconds=3.0)
    engine.controller.end("", "A")
    history = engine.controller.gaps
    assert (history.count(), history.count(with_censored=True)) == (0, 1)
    assert history.survival(None).at(math.inf) == 1.0
