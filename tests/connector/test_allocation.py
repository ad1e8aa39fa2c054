"""Memory pressure on vLLM's real scheduler: order, victims, no wedge."""

from __future__ import annotations

import random

import pytest

from tests.connector.conftest import (
    FOREVER,
    HOLD_5S,
    HOLD_ALL,
    free,
    pinned,
    play_on_a_tiny_pool,
    totals,
)
from ttlcache.types import GapKey, Urgency


def start(engine, program, tokens, *, turn=1, max_tokens=10, base=None, **hints):
    first = 1000 * (base if base is not None else ord(program))
    return engine.add(
        f"{program}-{turn}",
        range(first, first + tokens),
        max_tokens=max_tokens,
        hints={"program_id": program, "tool": "bash", **hints},
    )


def admission_order(engine) -> list[str]:
    order = []
    while engine.scheduler.has_unfinished_requests():
        output = engine.step()
        order += [r.req_id for r in output.scheduled_new_reqs]
    return order


def test_decode_takes_pins_before_it_preempts(make_engine, async_scheduling):
    engine = make_engine(
        num_blocks=21,
        async_scheduling=async_scheduling,
        extra_config=HOLD_ALL,
    )
    start(engine, "A", 150)
    engine.run()
    assert pinned(engine) == 9
    request = start(engine, "B", 100, max_tokens=200, base=1)
    engine.run()
    assert request.num_preemptions == 0
    assert pinned(engine) < 20
    assert "B-1" in engine.finished


def test_shrinking_frees_the_tail_and_keeps_the_prefix(make_engine):
    engine = make_engine(num_blocks=21, extra_config=FOREVER)
    start(engine, "A", 150)
    engine.run()
    (pin,) = engine.controller.pins
    prefix = list(pin.turn.hashes[:2])
    start(engine, "B", 200, max_tokens=8, base=1)
    engine.step()
    # 13 blocks for B: of 11 free ones and 9 pinned ones two must go.
    assert pinned(engine) == 7
    assert list(pin.turn.hashes[:2]) == prefix


def test_head_of_the_queue_takes_younger_pins_but_not_older_ones(make_engine):
    engine = make_engine(num_blocks=31, extra_config=HOLD_ALL)
    a = start(engine, "A", 100, max_tokens=10)
    engine.run()
    context = list(a.all_token_ids)
    # A comes back without a pin.
    engine.controller.memory.release_all()
    start(engine, "B", 100)
    engine.run()
    start(engine, "C", 100)
    engine.run()
    assert pinned(engine) == 12
    runner = start(engine, "R", 100, max_tokens=60)
    engine.step()
    engine.add("A-2", context + [3] * 90, hints={"program_id": "A"})
    engine.step()
    owners = {p.program.program_id for p in engine.controller.pins}
    assert "B" in owners
    assert "A-2" not in {r.request_id for r in engine.scheduler.waiting}
    assert not runner.is_finished()
    start(engine, "D", 290, max_tokens=4)
    engine.step()
    # D is the youngest: it waits for others' pins while somebody runs.
    assert [r.request_id for r in engine.scheduler.waiting] == ["D-1"]
    engine.run()
    assert "D-1" in engine.finished


def test_nothing_running_means_every_pin_may_go(make_engine, async_scheduling):
    engine = make_engine(
        num_blocks=31,
        async_scheduling=async_scheduling,
        extra_config=HOLD_ALL,
    )
    for program in "ABC":
        start(engine, program, 130)
        engine.run()
    assert free(engine) < 20
    start(engine, "Z", 400, max_tokens=20)
    engine.run(max_steps=100)
    assert "Z-1" in engine.finished
    assert totals(engine)["pins:victim"] >= 2


def lose_pins(engine):
    """What a running request does that needs all the memory there is."""
    controller = engine.controller
    assert controller.memory.reclaim(10_000, Urgency.RUNNING, "nobody's")
    assert not len(controller.pins)


def test_ttl_aware_order_preempted_pinned_then_program_arrival(make_engine):
    engine = make_engine(num_blocks=200, max_num_seqs=1, extra_config=FOREVER)
    start(engine, "A", 40)
    engine.run()
    old = list(engine.finished["A-1"].all_token_ids)
    lose_pins(engine)
    pinned_context = list(start(engine, "B", 40, base=2).all_token_ids)
    engine.run()
    pinned_context = list(engine.finished["B-1"].all_token_ids)
    start(engine, "R", 40, max_tokens=10)
    engine.step()
    start(engine, "N", 40)  # youngest program, arrives first
    engine.add("A-2", [*old, 1, 2], hints={"program_id": "A"})
    engine.add("B-2", [*pinned_context, 1, 2], hints={"program_id": "B"})
    assert admission_order(engine) == ["B-2", "A-2", "N-1"]


def test_program_fcfs_ignores_pins(make_engine):
    engine = make_engine(
        num_blocks=200,
        max_num_seqs=1,
        extra_config={**FOREVER, "ordering": "program-fcfs"},
    )
    for program in "AB":
        start(engine, program, 40)
        engine.run()
    a, b = (list(engine.finished[f"{p}-1"].all_token_ids) for p in "AB")
    start(engine, "R", 40)
    engine.step()
    engine.add("B-2", [*b, 1], hints={"program_id": "B"})
    engine.add("A-2", [*a, 1], hints={"program_id": "A"})
    assert admission_order(engine) == ["A-2", "B-2"]


def test_a_request_that_waited_too_long_goes_first(make_engine, clock):
    engine = make_engine(
        num_blocks=200,
        max_num_seqs=1,
        extra_config={**FOREVER, "max_queue_wait_s": 30.0},
    )
    start(engine, "B", 40)
    engine.run()
    context = list(engine.finished["B-1"].all_token_ids)
    start(engine, "R", 40, max_tokens=5)
    engine.step()
    start(engine, "N", 40)
    clock.advance(31.0)
    engine.add("B-2", [*context, 1, 2], hints={"program_id": "B"})
    assert admission_order(engine) == ["N-1", "B-2"]
    assert totals(engine)["aged_requests"] == 1


def test_an_overdue_head_may_take_older_pins(make_engine, clock):
    engine = make_engine(
        num_blocks=31,
        extra_config={**HOLD_ALL, "max_queue_wait_s": 30.0},
    )
    start(engine, "A", 300)
    engine.run()
    start(engine, "R", 60, max_tokens=100)
    engine.step()
    start(engine, "N", 200)
    engine.step()
    assert len(engine.scheduler.waiting) == 1
    clock.advance(31.0)
    engine.step()
    assert len(engine.scheduler.waiting) == 0


def test_user_priority_counts_only_when_the_operator_allows_it(make_engine):
    for policy, expected in (("fcfs", ["A-1", "B-1"]), ("priority", ["B-1", "A-1"])):
        engine = make_engine(num_blocks=200, max_num_seqs=1, policy=policy)
        start(engine, "R", 40)
        engine.step()
        for program, priority in (("A", 5), ("B", -5)):
            engine.add(
                f"{program}-1",
                range(40),
                hints={"program_id": program},
                priority=priority,
            )
        assert admission_order(engine) == expected


def test_preempted_requests_resume_and_everything_finishes(make_engine):
    engine = make_engine(num_blocks=30, extra_config=HOLD_5S)
    requests = [start(engine, p, 60, max_tokens=80) for p in "ABCDE"]
    engine.run()
    assert sum(r.num_preemptions for r in requests) > 0
    assert len(engine.finished) == 5


@pytest.mark.parametrize("seed", range(10))
def test_random_programs_on_a_tiny_pool_never_wedge(make_engine, clock, seed):
    rng = random.Random(seed)
    spec = {"async_scheduling": bool(seed % 2), "extra_config": HOLD_ALL}
    play_on_a_tiny_pool(make_engine, rng, rng.randrange(2, 8), clock, **spec)


def test_a_silent_program_does_not_keep_later_ones_waiting(make_engine, clock):
    engine = make_engine(
        num_blocks=31,
        extra_config={"policy": "adaptive", "max_pinned_fraction": 1.0},
    )
    controller = engine.controller
    for _ in range(60):
        controller.gaps.observe(GapKey("bash"), 1.0)
    start(engine, "A", 250)
    engine.run()
    (pin,) = controller.pins
    assert pin.deadline_s == clock.now_s() + controller.config.max_ttl_s
    clock.advance(5.0)  # nobody who was away for so long has come back
    runner = start(engine, "R", 20, max_tokens=60)
    engine.step()
    late = start(engine, "L", 300, max_tokens=4)
    engine.step()
    assert not runner.is_finished()
    assert late in engine.scheduler.running
    assert totals(engine)["pins:expired"] == 1
