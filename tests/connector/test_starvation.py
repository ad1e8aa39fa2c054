"""docs/scheduling.md: how long a request can wait, against an adversary."""

from __future__ import annotations

import pytest

from tests.connector.conftest import FOREVER, totals
from tests.connector.test_fairness import (
    STEP_S,
    TURN_TOKENS,
    Crowd,
    behind_endless_seniors,
)


def waited_s(make_engine, clock, bound_s: float, horizon_s: float, **config) -> float:
    """Seconds until a newcomer is admitted while pinned short programs flood.

    Two slots, six programs whose tools take no time: at every moment somebody with
    a claimable pin waits. They are younger than nobody and always before the
    newcomer in the paper's order.
    """
    engine = make_engine(
        num_blocks=200,
        max_num_seqs=2,
        extra_config={
            "ordering": "ttl-aware",
            **FOREVER,
            "max_queue_wait_s": bound_s,
            **config,
        },
    )
    return behind_endless_seniors(Crowd(engine, clock), horizon_s)


@pytest.mark.parametrize("bound_s", [5.0, 20.0])
def test_the_bound_holds_against_a_flood_of_pinned_programs(
    make_engine, clock, bound_s
):
    # Overdue, it is next; a slot is free once a running turn has ended.
    slack_s = (TURN_TOKENS + 3) * STEP_S
    waited = waited_s(make_engine, clock, bound_s, horizon_s=60.0)
    assert bound_s <= waited <= bound_s + slack_s


def test_without_the_bound_the_flood_starves_the_newcomer(make_engine, clock):
    assert waited_s(make_engine, clock, 1e6, horizon_s=60.0) == float("inf")


def test_program_fcfs_needs_the_bound_as_well(make_engine, clock):
    waited = waited_s(make_engine, clock, 10.0, horizon_s=60.0, ordering="program-fcfs")
    assert waited <= 10.0 + (TURN_TOKENS + 3) * STEP_S


def test_overdue_requests_are_served_in_the_order_they_came(make_engine, clock):
    engine = make_engine(
        num_blocks=200, max_num_seqs=1, extra_config={"max_queue_wait_s": 1.0}
    )
    engine.add("running", range(20), max_tokens=5, session_id="r")
    engine.step()
    for index in range(4):
        engine.add(f"w{index}", range(20), max_tokens=1, session_id=f"s{index}")
        clock.advance(0.1)
    clock.advance(5.0)
    engine.run()
    order = list(engine.finished)
    assert order == ["running", "w0", "w1", "w2", "w3"]
    assert totals(engine)["aged_requests"] == 4


def flooded_s(make_engine, clock, bound_s: float, horizon_s: float) -> float:
    """Seconds that a long program's next turn waits while short ones keep coming.

    Under least-work: a program of six turns, more than anybody has made, expects as
    many more; newcomers, one after the other, expect one.
    """
    engine = make_engine(
        num_blocks=200,
        max_num_seqs=1,
        extra_config={
            "policy": "none",
            "ordering": "least-work",
            "max_queue_wait_s": bound_s,
        },
    )

    def run_turn(name: str, prompt: list[int], **hints: object) -> list[int]:
        engine.add(name, prompt, max_tokens=TURN_TOKENS, hints=hints)
        while name not in engine.finished:
            engine.step()
            clock.advance(STEP_S)
        return list(engine.finished.pop(name).all_token_ids)

    for index in range(5):
        name = f"taught{index}"
        run_turn(name, [index + 1] * 20, program_id=name, is_last_step=True)
    context = [90] * 20
    for turn in range(6):
        context = run_turn(f"long/{turn}", context, program_id="long", tool="ls")
    flood = 0
    engine.add("long/next", context, max_tokens=1, hints={"program_id": "long"})
    start_s = clock.now_s()
    while clock.now_s() - start_s < horizon_s:
        if "long/next" in engine.finished:
            return clock.now_s() - start_s
        while len(engine.scheduler.waiting) < 3:
            flood += 1
            hints = {"program_id": f"short{flood}", "is_last_step": True}
            prompt = [100 + flood] * 20
            engine.add(f"short{flood}", prompt, max_tokens=TURN_TOKENS, hints=hints)
        engine.step()
        clock.advance(STEP_S)
    return float("inf")


def test_the_bound_holds_against_a_flood_of_short_programs(make_engine, clock):
    waited = flooded_s(make_engine, clock, 5.0, horizon_s=60.0)
    assert 5.0 <= waited <= 5.0 + (TURN_TOKENS + 3) * STEP_S


def test_without_the_bound_short_programs_starve_a_long_one(make_engine, clock):
    assert flooded_s(make_engine, clock, 1e6, horizon_s=60.0) == float("inf")
