"""A turn of a program, and the next one."""

from __future__ import annotations

from tests.core.controller.stories import (
    PROMPT,
    TTL_S,
    make_engine,
    outcomes,
    pins,
    total,
)
from ttlcache.estimators.step_fit import Step
from ttlcache.types import PinOutcome


def test_the_next_turn_claims_the_pin():
    engine = make_engine()
    context = engine.turn("r1", PROMPT, [11, 12, 13], program="A")
    assert [pin.kv_blocks for pin in pins(engine)] == [3]  # 12 tokens with KV
    assert engine.holder.free_blocks == 61

    engine.step(seconds=3.0)
    engine.arrive("r2", [*context, 14], program="A")
    assert engine.controller.telemetry.metrics.observations["gap_seconds"] == [3.0]
    assert engine.admit("r2")
    assert outcomes(engine) == {PinOutcome.CLAIMED: 1}
    assert total(engine, "claimed_tokens") == 12
    assert pins(engine) == []
    engine.check()


def test_a_pin_expires_at_its_deadline():
    engine = make_engine()
    engine.turn("r1", PROMPT, program="A")
    engine.step(seconds=TTL_S - 0.1)
    assert len(pins(engine)) == 1
    engine.step(seconds=0.1)
    assert outcomes(engine) == {PinOutcome.EXPIRED: 1}
    assert engine.controller.telemetry.metrics.observations["pinned_seconds"] == [TTL_S]
    assert engine.holder.free_blocks == 64


def test_a_pin_whose_turn_waits_in_the_queue_does_not_expire():
    engine = make_engine()
    context = engine.turn("r1", PROMPT, program="A")
    engine.arrive("r2", [*context, 9], program="A")
    engine.step(seconds=100 * TTL_S)
    assert len(pins(engine)) == 1
    assert engine.admit("r2")
    assert outcomes(engine) == {PinOutcome.CLAIMED: 1}


def test_a_return_to_lost_kv_is_counted_and_its_wait_learnt():
    engine = make_engine(pool_blocks=8)
    context = engine.turn("r1", PROMPT, [11, 12, 13], program="A")
    engine.step(seconds=TTL_S)
    engine.turn("other", [*range(100, 128)], program="B", ttl=0)
    engine.arrive("r2", context, program="A")
    engine.step(seconds=4.0)
    engine.admit("r2")
    assert total(engine, "evicted_returns") == 1
    assert engine.controller.costs.queueing_delay_s == 4.0


def test_a_return_that_finds_its_kv_without_a_pin_is_no_loss():
    engine = make_engine()
    context = engine.turn("r1", PROMPT, [11, 12, 13], program="A")
    engine.step(seconds=TTL_S)
    engine.turn("r2", context, program="A")
    assert total(engine, "evicted_returns") == 0


def test_the_time_of_a_step_goes_to_the_prompts_in_it():
    engine = make_engine()
    parts = [("r1", 0, 1_500), ("r2", 7_000, 7_500), ("gone", 0, 48)]
    step = Step(engine.clock.now_s(), prompts=parts)
    engine.clock.advance(2.0)
    engine.controller.on_step(step)
    assert engine.controller.costs.prefill_s(20_480) > 10.0


def test_a_preempted_request_is_admitted_twice_but_claims_once():
    engine = make_engine()
    context = engine.turn("r1", PROMPT, [11, 12, 13], program="A")
    engine.arrive("r2", [*context, 14], program="A")
    engine.admit("r2")
    engine.preempt("r2")
    engine.step(seconds=50.0)
    assert engine.admit("r2")
    assert outcomes(engine) == {PinOutcome.CLAIMED: 1}
    assert total(engine, "evicted_returns") == 0
    engine.finish("r2")
    engine.check()


def test_a_decode_without_memory_takes_pins_then_preempts():
    engine = make_engine(pool_blocks=6)
    engine.turn("a", PROMPT, [11, 12, 13], program="A")
    engine.arrive("b", [20, 21, 22, 23], program="B")
    engine.admit("b")
    assert engine.decode("b", [*range(30, 50)])
    assert outcomes(engine) == {PinOutcome.VICTIM: 1}
    assert not engine.decode("b", [30, 31, 32, 33])
    assert engine.holder.num_waiting == 1
    engine.abort("b")
    engine.check()
