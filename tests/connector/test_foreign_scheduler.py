"""Under a scheduler class that is not ours: still pins, still cannot wedge."""

from __future__ import annotations

from tests.connector.conftest import free, pinned, totals

VLLM_OWN = "vllm.v1.core.sched.scheduler.Scheduler"


def test_pins_claims_and_expires(make_engine, clock):
    engine = make_engine(num_blocks=40, scheduler_cls=VLLM_OWN)
    context = engine.turn("A-1", range(149), max_tokens=20, session_id="A")
    assert pinned(engine) == 10
    engine.turn("A-2", context + [7] * 30, session_id="A")
    assert totals(engine)["pins:claimed"] == 1
    clock.advance(6.0)
    engine.step()
    assert free(engine) == 39


def test_does_not_wedge_when_pins_hold_everything(make_engine):
    engine = make_engine(
        num_blocks=31,
        scheduler_cls=VLLM_OWN,
        extra_config={
            "policy": "fixed",
            "policy_options": {"ttl_s": 300.0},
            "max_pinned_fraction": 1.0,
        },
    )
    for program in range(3):
        engine.turn(f"{program}", range(1000 * program, 1000 * program + 130))
    engine.add("Z", range(9000, 9400), max_tokens=20)
    engine.run(max_steps=100)
    assert "Z" in engine.finished


def test_says_once_what_is_missing(make_engine, our_log):
    engine = make_engine(num_blocks=40, scheduler_cls=VLLM_OWN)
    engine.turn("A-1", range(149))
    engine.turn("B-1", range(149))
    assert sum("is not ours" in line for line in our_log) == 1
    assert sum("policy=fixed" in line for line in our_log) == 1
