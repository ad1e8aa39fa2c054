"""Awaited turns: retries, rewritten histories, sub-agents and their parents."""

import math

import pytest

from tests.core.stories import PROMPT, TTL_S, make_engine, with_prefill_cost
from ttlcache.programs.model import MAX_AWAITED_TURNS
from ttlcache.types import PinOutcome

CHILD = {"program": "C", "parent_id": "P", "is_last_step": True}


# --- a retry holds the same pin ------------------------------------------------


@pytest.fixture
def retried(engine):
    """r2 waits and holds the pin of r1; its client gives up too early: r3 comes."""
    context = engine.turn("r1", PROMPT, [11, 12, 13], program="A")
    engine.step(seconds=3.0)
    engine.arrive("r2", [*context, 5], program="A")
    engine.arrive("r3", [*context, 6], program="A")
    engine.context = context
    return engine


def test_a_retry_holds_the_pin_that_its_first_try_holds(retried):
    (pin,) = retried.pins()
    assert pin.claimants == {"r2", "r3"}
    retried.abort("r2")
    assert retried.admit("r3")
    assert retried.outcomes() == {PinOutcome.CLAIMED: 1}
    assert retried.total("claimed_tokens") == 12
    # The gap ended once, with the first try.
    assert retried.observed("gap_seconds") == [3.0]


def test_the_first_to_claim_takes_the_pin_from_the_others(retried):
    with_pin = retried.controller.queue.priority("r3")
    assert retried.admit("r2")
    assert retried.outcomes() == {PinOutcome.CLAIMED: 1}
    assert sorted(retried.rekeyed) == ["r2", "r3"]
    assert retried.controller.queue.priority("r3") > with_pin
    assert retried.admit("r3")  # its blocks are there: no loss
    assert retried.total("evicted_returns") == 0


def test_the_first_holder_is_aborted_after_the_deadline_while_a_retry_waits(retried):
    retried.step(seconds=5 * TTL_S)
    retried.abort("r2")
    retried.step()
    assert len(retried.pins()) == 1
    assert retried.admit("r3")
    assert retried.outcomes() == {PinOutcome.CLAIMED: 1}


def test_when_all_holders_are_gone_the_deadline_counts_again(retried):
    retried.step(seconds=5 * TTL_S)
    for request_id in ("r2", "r3"):
        retried.abort(request_id)
    retried.step()
    assert retried.outcomes() == {PinOutcome.EXPIRED: 1}
    assert retried.program("A").awaited_turns == []
    # Whoever comes now continues nothing: its wait is no lost return's.
    retried.turn("r4", retried.context, program="A")
    assert len(retried.observed("gap_seconds")) == 1


def test_a_claimed_turn_is_over_and_a_second_branch_of_it_is_new(retried):
    retried.admit("r2")
    record = retried.arrive("r4", [*retried.context, 6], program="A")
    assert (record.pin_id, record.reusable_tokens) == (None, 0)
    assert len(retried.observed("gap_seconds")) == 1


def test_a_program_that_ends_lets_all_waiting_retries_claim_or_go(retried):
    retried.end("A")
    retried.abort("r2")
    assert len(retried.pins()) == 1
    retried.abort("r3")
    assert retried.outcomes() == {PinOutcome.ENDED: 1}
    assert retried.holder.free_blocks == 64


def test_turns_that_somebody_waits_for_do_not_count_against_the_bound():
    # Scenario: one turn is held; as many as the bound allows finish after it, and
    # one more. The oldest that nobody waits for gives way, not the held one.
    engine = make_engine(pool_blocks=512)
    context = engine.turn("held", [7] * 9, program="A")
    engine.arrive("waits", [*context, 1, 1], program="A")
    for number in range(MAX_AWAITED_TURNS + 1):
        engine.turn(f"r{number}", [100 + number] * 9, program="A")
    assert engine.outcomes() == {PinOutcome.SUPERSEDED: 1}
    assert len(engine.pins()) == MAX_AWAITED_TURNS + 1
    assert engine.admit("waits")
    assert engine.outcomes() == {PinOutcome.SUPERSEDED: 1, PinOutcome.CLAIMED: 1}


# --- rewritten histories -------------------------------------------------------


def test_a_rewrite_of_an_unpinned_turn_closes_its_gap(engine):
    # Scenario: the pin has expired, and with it the hashes; the agent comes back
    # with a summary of its history. The gap ended; that nothing was hit is not
    # the engine's fault.
    engine.turn("r1", PROMPT, program="A")
    engine.step(seconds=TTL_S)
    record = engine.arrive("r2", [90, 91, 92, 93, 94], program="A")
    assert engine.observed("gap_seconds") == [TTL_S]
    assert len(engine.controller.gaps._open) == 0
    assert (record.pin_id, record.reusable_tokens) == (None, 0)
    assert engine.program("A").reuse_share == 1.0  # nobody knows what it shared
    engine.admit("r2")
    assert engine.total("evicted_returns") == 0


def test_a_retry_that_rewrites_what_cannot_be_shortened_ends_the_pin():
    # Scenario: r2 continues r1 and is aborted; the retry is a rewritten prompt,
    # and this holder cannot shorten a pin.
    engine = make_engine(whole_pins=True)
    context = engine.turn("r1", PROMPT, [*range(11, 24)], program="A")
    engine.arrive("r2", context, program="A")
    engine.abort("r2")
    record = engine.arrive("r3", [*PROMPT[:8], 90, 91], program="A")
    assert engine.outcomes() == {PinOutcome.SUPERSEDED: 1}
    assert (record.pin_id, record.reusable_tokens) == (None, 8)
    assert engine.program("A").awaited_turns == []


def test_a_retry_of_a_rewritten_prompt_shortens_the_pin_no_further(engine):
    engine.turn("r1", PROMPT, [*range(11, 24)], program="A")
    rewritten = [*PROMPT[:8], 90, 91, 92, 93, 94]
    for request_id in ("r2", "r3"):
        engine.arrive(request_id, rewritten, program="A")
        assert engine.pinned() == {"A": 2}
        engine.abort(request_id)


def test_a_client_that_drops_outputs_keeps_its_place_and_pins_prompts_only(engine):
    # Scenario: a chat template that leaves out reasoning. Each prompt extends the last
    # one, and none what came of it.
    prompt, outputs = list(range(40)), list(range(100, 140))
    engine.turn("a1", prompt, outputs, program="A")
    engine.turn("b1", [60] * 40, outputs, program="B")
    assert engine.pinned()["A"] == 19
    prompt += list(range(200, 220))
    record = engine.arrive("a2", prompt, program="A")
    assert record.reusable_tokens == 40
    assert engine.pinned()["A"] == 10  # of 40 tokens: what was put out goes at once
    engine.arrive("b2", [61] * 40, program="B")  # another task under the same id
    assert engine.order("a2", "b2") == ["a2", "b2"]
    assert engine.admit("a2")
    engine.decode("a2", outputs)
    engine.finish("a2")
    assert engine.pinned()["A"] == 15  # of 60 tokens
    assert engine.program("A").reuse_share == 1.0


#: What a template puts before an answer; prompts repeat all but the last token of it.
TEMPLATE = [70, 71, 72, 73]


def test_a_prompt_without_the_reasoning_before_it_is_recognised_without_an_id(engine):
    for number in range(3):
        engine.turn(f"warm-up-{number}", [*[200 + number] * 12, *TEMPLATE])
    question = [*range(20), *TEMPLATE]
    for number in range(8):  # a batch of one prompt
        engine.turn(f"a{number}", question, [100 + number, 101, 102, 103])
    engine.step(seconds=1.0)
    for number, prompt in enumerate(
        [
            question,  # the same again
            [*range(12), *range(30, 38), *TEMPLATE],  # another question
            [*range(12), 8, *TEMPLATE, 90, 91, 92, *TEMPLATE],  # a shorter one, went on
        ]
    ):
        assert engine.arrive(f"other{number}", prompt).reusable_tokens == 0
        engine.abort(f"other{number}")
    record = engine.arrive("a", [*question[:-1], *range(40, 45), *TEMPLATE])
    assert (record.reusable_tokens, record.program.turns_finished) == (20, 1)
    found = engine.arrive("b", [*question, 103, 101, 102, 103, 44]).program
    assert found is not record.program


def test_shares_are_learnt_half_of_the_way_each_time(engine):
    # 2 of 5 blocks shared: 1 + (0.4 - 1) / 2 = 0.7; then a plain continuation.
    engine.turn("r1", PROMPT, [*range(11, 24)], program="A")
    context = engine.turn("r2", [*PROMPT[:8], 90, 91, 92], program="A")
    assert engine.program("A").reuse_share == pytest.approx(0.7)
    engine.turn("r3", context, program="A")
    assert engine.program("A").reuse_share == pytest.approx(0.85)


# --- sub-agents under their own id ---------------------------------------------


def test_a_parent_is_awaited_long_enough_when_its_sub_agent_ends():
    # Scenario, with a second of prefill per token:
    #   1. The parent's turn starts a sub-agent and is pinned until 10 s.
    #   2. The child runs from 1 s and ends at 9 s, too late for that deadline.
    #   3. The parent has 11 tokens: it is held for 11 s from there.
    engine = with_prefill_cost(make_engine())
    context = engine.turn("p1", PROMPT, program="P", tool="Task")
    engine.turn("other", [50] * 9, program="O", tool="bash")
    engine.step(seconds=1.0)
    engine.arrive("c1", [80] * 9, **CHILD)
    engine.admit("c1")
    engine.step(seconds=8.0)
    engine.finish("c1")
    assert engine.deadlines() == {"P": 20.0, "O": 10.0}
    engine.step(seconds=10.9)
    engine.turn("p2", context, program="P")
    assert engine.outcomes() == {PinOutcome.CLAIMED: 1, PinOutcome.EXPIRED: 1}


@pytest.mark.parametrize(
    ("tool", "token_s", "max_ttl_s", "waited_s", "deadline_s"),
    [
        ("Task", 1.0, 4.0, 3.0, 7.0),  # not 3 + 11: capped
        ("Task", 1e-3, 300.0, 0.0, TTL_S),  # never shortened
        # Turns that wait for no sub-agent.
        ("bash", 1.0, 300.0, 9.0, TTL_S),
        ("ask_user", 1.0, 300.0, 9.0, TTL_S),
    ],
)
def test_renewing_never_shortens_and_is_capped(
    tool, token_s, max_ttl_s, waited_s, deadline_s
):
    engine = with_prefill_cost(make_engine(max_ttl_s=max_ttl_s), token_s)
    engine.turn("p1", PROMPT, program="P", tool=tool)
    engine.step(seconds=waited_s)
    engine.turn("c1", [80] * 9, **CHILD)
    assert engine.deadlines() == {"P": deadline_s}


def test_a_parent_whose_pin_is_gone_or_that_ended_is_left_in_peace():
    engine = with_prefill_cost(make_engine())
    engine.turn("p1", PROMPT, program="P", tool="Task")
    for child in ("C", "D"):
        engine.turn(f"{child}1", [80] * 9, program=child, parent_id="P")
    engine.controller.memory.release_all()
    for label in "CPD":
        engine.end(label)
    assert engine.pins() == []


def test_the_parent_of_a_nested_sub_agent_is_the_one_renewed():
    engine = with_prefill_cost(make_engine())
    engine.turn("p1", PROMPT, program="P", tool="Task")
    engine.turn("c1", [80] * 9, program="C", parent_id="P", tool="Task")
    engine.step(seconds=9.0)
    engine.turn("g1", [90] * 9, program="G", parent_id="C", is_last_step=True)
    assert engine.deadlines() == {"P": 10.0, "C": 19.0}  # 9 + 10 tokens
    engine.end("C")
    assert engine.deadlines() == {"P": 20.0}


def test_a_parent_is_found_inside_the_tenant_once_and_for_all(engine):
    for label in "PQ":
        engine.turn(label, PROMPT, program=label)
    engine.turn("x", PROMPT, program="X", tenant="other", parent_id="P")
    assert engine.controller.programs.get(("other", "X")).parent is None
    engine.turn("c1", [80] * 9, program="C", parent_id="nobody")
    assert engine.program("C").parent is None
    for parent in "PQ":
        engine.turn(f"c-{parent}", [80] * 9, program="C", parent_id=parent)
        assert engine.program("C").parent is engine.program("P")


def test_nobody_is_its_own_parent_or_its_parents_parent(engine):
    engine.turn("a", PROMPT, program="A", parent_id="A")
    assert engine.program("A").parent is None
    engine.turn("b", PROMPT, program="B", parent_id="A")
    engine.turn("a2", PROMPT, program="A", parent_id="B")
    assert engine.program("A").parent is None
    b = engine.program("B")
    assert b.parent is engine.program("A")
    for label in "AB":
        engine.end(label)
    assert b.parent is None  # ancestors are not kept in memory


# --- the sweep -----------------------------------------------------------------


def test_a_gap_that_nobody_ended_is_learnt_as_endless(engine):
    engine.turn("r1", PROMPT, program="A")
    engine.step(seconds=3.0)
    engine.end("A")
    history = engine.controller.gaps
    assert (history.count(), history.count(with_censored=True)) == (0, 1)
    assert history.survival(None).at(math.inf) == 1.0
