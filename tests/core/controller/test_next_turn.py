"""A turn of a program and the next one; several at once, and rewritten histories."""

import pytest

from tests.core.stories import PROMPT, TTL_S, make_engine
from ttlcache.controller import Controller
from ttlcache.estimators.step_fit import Step
from ttlcache.types import PinOutcome, Urgency


def test_a_return_to_lost_kv_is_counted_and_its_wait_learnt():
    engine = make_engine(pool_blocks=8)
    context = engine.turn("r1", PROMPT, [11, 12, 13], program="A")
    engine.step(seconds=TTL_S)
    engine.turn("other", [*range(100, 128)], program="B", ttl=0)
    engine.arrive("r2", context, program="A")
    engine.step(seconds=4.0)
    engine.admit("r2")
    assert engine.total("evicted_returns") == 1
    assert engine.controller.costs.queueing_delay_s == 4.0


def test_the_time_of_a_step_goes_to_the_prompts_in_it(engine):
    parts = [("r1", 0, 1_500), ("r2", 7_000, 7_500), ("gone", 0, 48)]
    step = Step(engine.clock.now_s(), prompts=parts)
    engine.clock.advance(2.0)
    engine.controller.on_step(step)
    assert engine.controller.costs.prefill_s(20_480) > 10.0


def test_a_preempted_request_is_admitted_twice_but_claims_once(engine):
    context = engine.turn("r1", PROMPT, [11, 12, 13], program="A")
    engine.arrive("r2", [*context, 14], program="A")
    engine.admit("r2")
    engine.preempt("r2")
    engine.step(seconds=50.0)
    assert engine.admit("r2")
    assert engine.outcomes() == {PinOutcome.CLAIMED: 1}
    assert engine.total("evicted_returns") == 0
    engine.finish("r2")


def test_a_decode_without_memory_takes_pins_then_preempts():
    engine = make_engine(pool_blocks=6)
    engine.turn("a", PROMPT, [11, 12, 13], program="A")
    engine.arrive("b", [20, 21, 22, 23], program="B")
    engine.admit("b")
    assert engine.decode("b", [*range(30, 50)])
    assert engine.outcomes() == {PinOutcome.VICTIM: 1}
    assert not engine.decode("b", [30, 31, 32, 33])
    assert engine.holder.num_waiting == 1
    engine.abort("b")


# --- who waits for whom, and who is told ---------------------------------------


def test_priority_follows_the_program_and_its_pin(engine):
    context = engine.turn("a1", PROMPT, program="A")
    engine.arrive("b1", [90, 91], program="B")
    engine.arrive("a2", [*context, 1], program="A")
    engine.arrive("urgent", [80], program="C", user_priority=-1)
    assert engine.order("b1", "a2", "urgent") == ["urgent", "a2", "b1"]
    priority = engine.controller.queue.priority
    assert priority("urgent") < priority("b1", preempted=True) < priority("a2")
    with pytest.raises(KeyError):
        priority("never arrived")


@pytest.mark.parametrize("is_told", [True, False])
def test_a_lost_pin_changes_the_priority_and_says_so(engine, is_told):
    if not is_told:  # a controller without a queue
        config = engine.controller.config
        args = config, engine.clock, engine.holder, engine.block_tokens
        engine.controller = Controller(*args)
    context = engine.turn("a1", PROMPT, program="A")
    engine.arrive("a2", [*context, 1], program="A")
    before = engine.controller.queue.priority("a2")
    engine.controller.memory.release_all()
    assert engine.rekeyed == (["a2"] if is_told else [])
    assert engine.controller.queue.priority("a2") > before
    assert engine.outcomes() == {PinOutcome.RESET: 1}
    assert engine.admit("a2")


# --- several turns of a program at once, and rewritten histories


def test_parallel_branches_claim_their_own_pins(engine):
    engine.arrive("left", [*PROMPT, 100], program="A")
    engine.arrive("right", [*PROMPT, 200], program="A")
    for name in ("left", "right"):
        engine.admit(name)
        engine.decode(name, [11, 12, 13])
    for name in ("left", "right"):
        assert engine.finish(name).decision is not None
    assert len(engine.pins()) == 2
    engine.turn("right2", [*PROMPT, 200, 11, 12, 13], program="A")
    engine.turn("left2", [*PROMPT, 100, 11, 12, 13], program="A")
    assert engine.outcomes() == {PinOutcome.CLAIMED: 2}


@pytest.mark.parametrize("tool", ["Task", ["read", "Task"]])
def test_a_sub_agent_does_not_disturb_its_parents_pin(engine, tool):
    # Scenario: a call of the turn, alone or beside others, starts a sub-agent under
    # the same id; its prompt shares the first block only.
    context = engine.turn("parent", PROMPT, [11, 12, 13], program="A", tool=tool)
    engine.arrive("child", [*PROMPT[:4], 90, 91, 92, 93, 94], program="A")
    assert [(pin.kv_blocks, pin.has_claimant) for pin in engine.pins()] == [(3, False)]
    engine.admit("child")
    engine.finish("child")
    assert len(engine.pins()) == 2
    engine.turn("parent2", [*context, 14], program="A")
    assert engine.total("claimed_tokens") == 12


@pytest.mark.parametrize(("user_priority", "freed"), [(0, 2), (10, 0)])
def test_a_claim_is_safe_from_requests_that_are_not_more_urgent(
    engine, user_priority, freed
):
    engine.arrive("b1", [80] * 9, program="B", user_priority=user_priority)
    context = engine.turn("a1", PROMPT, program="A", user_priority=10)
    engine.arrive("a2", [*context, 14], program="A", user_priority=10)
    assert engine.reclaim(2, Urgency.WAITING, "b1") == freed


@pytest.mark.parametrize("tokens", [50, 600])
def test_a_side_request_with_the_templates_preamble_leaves_the_pin(tokens):
    # Scenario: while its tool runs, a client asks for a summary under the same id; of
    # the 100 blocks of the head its prompt has 2.
    engine = make_engine(pool_blocks=512)
    context = engine.turn("r1", [*range(1, 401)], [7], program="A")
    side = [*range(1, 9), *range(900, 900 + tokens)]
    engine.turn("side", side, [8], program="A")
    assert [pin.kv_blocks for pin in engine.pins()] == [100, len(side) // 4]
    engine.turn("r2", [*context, 9], program="A")
    assert engine.total("claimed_tokens") == 400


def test_of_a_client_that_changes_the_head_each_time_one_pin_too_many_is_kept():
    engine = make_engine(pool_blocks=512)
    for turn in range(5):
        prompt = [1, 2, 3, 4, 50 + turn, *range(100, 300 + 10 * turn)]
        engine.turn(f"r{turn}", prompt, [7], program="A")
    assert len(engine.pins()) == 2


def test_a_rewritten_history_keeps_the_shared_part(engine):
    engine.turn("r1", PROMPT, [*range(11, 24)], program="A")
    assert engine.pinned() == {"A": 5}
    engine.arrive("r2", [*PROMPT[:8], 90, 91, 92, 93, 94], program="A")
    assert engine.pinned() == {"A": 2}
    engine.admit("r2")
    assert engine.outcomes() == {PinOutcome.CLAIMED: 1}
    assert engine.total("claimed_tokens") == 8
    # What was rewritten cannot be hit: no loss of the engine's.
    assert engine.total("evicted_returns") == 0


def test_a_rewritten_history_keeps_every_shared_block():
    # Scenario: 29 of 100 blocks are shared; 29 / 100 * 100 is 28.999 in floats.
    engine = make_engine(pool_blocks=256)
    engine.turn("r1", [*range(1, 401)], [7], program="A")
    engine.arrive("r2", [*range(1, 117), *range(900, 1000)], program="A")
    assert engine.pinned() == {"A": 29}


def test_a_short_pin_loses_nothing_that_the_rewritten_history_shares(engine):
    # Scenario:
    #   1. Ten blocks are pinned; memory pressure takes all but three.
    #   2. The next prompt shares five blocks: all three can be hit.
    engine.turn("r1", [*range(1, 41)], [7], program="A")
    engine.reclaim(7, Urgency.RUNNING, "somebody")
    assert engine.pinned() == {"A": 3}
    engine.arrive("r2", [*range(1, 21), *range(900, 920)], program="A")
    assert engine.pinned() == {"A": 3}
