"""Memory pressure on vLLM's real scheduler: order, victims, no wedge."""

from __future__ import annotations

import pytest
from vllm.v1.request import Request

from tests.connector.conftest import (
    ASKING,
    FOREVER,
    HOLD_ALL,
    VLLM_OWN,
    begin,
    free,
    pinned,
    start,
    totals,
)
from ttlcache.types import Urgency

SCHEDULERS = {
    "ours": {},
    "ours-async": {"async_scheduling": True},
    "vllm": {"scheduler_cls": VLLM_OWN},
    "asking": {"scheduler_cls": ASKING},
}


def first_turns(engine, programs, tokens):
    for program in programs:
        start(engine, program, tokens)
        engine.run()


def comes_back(engine, program):
    context = engine.finished[f"{program}-1"].all_token_ids
    engine.add(f"{program}-2", [*context, 1, 2], hints={"program_id": program})


def waiting(engine):
    return [request.request_id for request in engine.scheduler.waiting]


def admission_order(engine) -> list[str]:
    order = []
    while engine.scheduler.has_unfinished_requests():
        order += [new.req_id for new in engine.step().scheduled_new_reqs]
    return order


def test_decode_takes_pins_before_it_preempts(make_engine, async_scheduling):
    engine = make_engine(
        num_blocks=21, async_scheduling=async_scheduling, extra_config=HOLD_ALL
    )
    first_turns(engine, "A", 150)
    assert pinned(engine) == 9
    request = start(engine, "B", 100, max_tokens=200, base=1)
    engine.run()
    assert request.num_preemptions == 0
    assert pinned(engine) < 20
    assert "B-1" in engine.finished


def test_head_of_the_queue_takes_younger_pins_but_not_older_ones(make_engine):
    engine = make_engine(num_blocks=31, extra_config=HOLD_ALL)
    a = start(engine, "A", 100)
    engine.run()
    # A comes back without a pin.
    engine.controller.memory.release_all()
    first_turns(engine, "BC", 100)
    assert pinned(engine) == 12
    runner = begin(engine, "R", 100, max_tokens=60)
    engine.add("A-2", [*a.all_token_ids, *[3] * 90], hints={"program_id": "A"})
    engine.step()
    assert "B" in {p.program.program_id for p in engine.controller.pins}
    assert "A-2" not in waiting(engine)
    assert not runner.is_finished()
    begin(engine, "D", 290, max_tokens=4)
    # D is the youngest: it waits for others' pins while somebody runs.
    assert waiting(engine) == ["D-1"]
    engine.run()
    assert "D-1" in engine.finished


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_nothing_running_means_every_pin_may_go(make_engine, scheduler):
    spec = SCHEDULERS[scheduler]
    engine = make_engine(num_blocks=31, extra_config=HOLD_ALL, **spec)
    first_turns(engine, "ABC", 130)
    assert free(engine) < 20
    start(engine, "Z", 400, max_tokens=20)
    engine.run(max_steps=100)
    assert "Z-1" in engine.finished
    assert totals(engine)["pins:victim"] >= 2


@pytest.mark.parametrize("scheduler", ["ours", "asking"])
def test_ttl_aware_order_preempted_pinned_then_program_arrival(make_engine, scheduler):
    engine = make_engine(
        num_blocks=200, max_num_seqs=1, extra_config=FOREVER, **SCHEDULERS[scheduler]
    )
    first_turns(engine, "A", 40)
    # What a running request does that needs all the memory there is.
    assert engine.controller.memory.reclaim(10_000, Urgency.RUNNING, "nobody's")
    assert not len(engine.controller.pins)
    first_turns(engine, "B", 40)
    begin(engine, "R", 40)
    start(engine, "N", 40)  # youngest program, arrives first
    for program in "AB":
        comes_back(engine, program)
    assert admission_order(engine) == ["B-2", "A-2", "N-1"]
    assert totals(engine)["pins:claimed"] == 1


@pytest.mark.parametrize(
    ("ordering", "spec", "waits"),
    [("auto", {}, ["N-1"]), ("request-fcfs", {}, []), ("auto", SCHEDULERS["vllm"], [])],
)
def test_who_may_take_older_pins(make_engine, clock, ordering, spec, waits):
    extra = {**HOLD_ALL, "max_queue_wait_s": 30.0, "ordering": ordering}
    engine = make_engine(num_blocks=31, extra_config=extra, **spec)
    first_turns(engine, "A", 300)
    begin(engine, "R", 60, max_tokens=100)
    begin(engine, "N", 200)
    assert waiting(engine) == waits
    clock.advance(31.0)
    engine.step()
    assert waiting(engine) == []


@pytest.mark.parametrize(
    ("policy", "order"), [("fcfs", ["A-1", "B-1"]), ("priority", ["B-1", "A-1"])]
)
def test_user_priority_counts_if_the_operator_allows_it(make_engine, policy, order):
    engine = make_engine(num_blocks=200, max_num_seqs=1, policy=policy)
    begin(engine, "R", 40)
    for program, priority in (("A", 5), ("B", -5)):
        hints = {"program_id": program}
        engine.add(f"{program}-1", range(40), hints=hints, priority=priority)
    assert admission_order(engine) == order


# --- what a pin is worth to others: regressions from the first outside review -------

SHARED = list(range(330))


def test_an_overdue_request_takes_nothing_if_it_would_not_fit(make_engine, clock):
    engine = make_engine(
        num_blocks=60, extra_config={**HOLD_ALL, "max_queue_wait_s": 5.0}
    )
    first_turns(engine, "A", 96)
    begin(engine, "run", 400, base=90, max_tokens=100)
    start(engine, "big", 800, base=9, max_tokens=4)
    clock.advance(6.0)
    for _ in range(3):
        engine.step()
    assert pinned(engine) == 6
    engine.run()
    assert "big-1" in engine.finished


def test_pins_that_cost_no_memory_are_no_victims(make_engine):
    engine = make_engine(num_blocks=60, max_num_seqs=4, extra_config=HOLD_ALL)
    for index in range(5):
        hints = {"program_id": f"p{index}", "tool": "x"}
        engine.turn(f"same-{index}", SHARED, max_tokens=2, hints=hints)
    assert pinned(engine) == 20
    engine.add("user", [*SHARED, 1], max_tokens=4)
    engine.step()
    for program, tokens, base in (("x", 300, 5), ("y", 200, 7)):
        start(engine, program, tokens, base=base, max_tokens=400)
    for _ in range(2):
        engine.step()
    assert "pins:victim" not in totals(engine)
    engine.run()


def test_a_shortage_that_is_over_is_forgotten(make_engine):
    engine = make_engine(num_blocks=30, extra_config=HOLD_ALL)
    begin(engine, "A", 300, max_tokens=20)
    begin(engine, "B", 300, max_tokens=2)
    assert engine.holder.pressure().memory_is_short
    engine.run()
    engine.step()
    assert not engine.holder.pressure().memory_is_short


# --- `--scheduling-policy priority`: pins do not turn the clients' priorities around


NEW = 40 * 16


@pytest.fixture
def beside_old(make_engine, async_scheduling):
    """An old program of low priority has a pin; a small request of it runs on."""
    engine = make_engine(
        num_blocks=65, async_scheduling=async_scheduling, policy="priority"
    )
    engine.turn("old", range(40 * 16), hints={"program_id": "old"}, priority=5)
    assert pinned(engine) == 40
    engine.add("runs", range(9000, 9016), max_tokens=100, priority=5)
    for _ in range(3):
        engine.step()
    return engine


@pytest.mark.parametrize(("priority", "kept"), [(0, False), (5, True), (9, True)])
def test_a_request_of_higher_priority_takes_an_older_programs_pin(
    beside_old, priority, kept
):
    """One of the same or a lower priority does not, and waits."""
    engine, prompt = beside_old, range(5000, 5000 + NEW)
    request = engine.add("new", prompt, hints={"program_id": "new"}, priority=priority)
    for _ in range(5):
        engine.step()
    assert "runs" in engine.scheduler.requests
    assert (request.num_computed_tokens == 0) is kept
    pins = engine.controller.pins
    left = sum(p.kv_blocks for p in pins if p.program.program_id == "old")
    assert (left == 40) is kept


def test_a_prompt_that_many_pins_hold_is_walked_once(make_engine, monkeypatch):
    """To count what pins would free; the head of the queue asks in every step."""
    engine = make_engine(num_blocks=500, extra_config={"max_pinned_fraction": 1.0})
    shared = list(range(1600))
    for number in range(6):
        tail = [5000 + number] * 40
        engine.turn(f"p{number}", shared + tail, hints={"program_id": f"p{number}"})
    holder, walked = engine.role.parts.holder, []
    assert len(holder.blocks_by_pin) == 6

    class Table(list):
        def __getitem__(self, index):
            walked.append(index)
            return super().__getitem__(index)

    monkeypatch.setattr(engine.pool, "blocks", Table(engine.pool.blocks))
    held = {b.block_id for blocks in holder.blocks_by_pin.values() for b in blocks}
    first, *others = holder.blocks_by_pin
    assert holder.count_freeable([first, *others], 10_000) == len(held)
    assert len(walked) <= len(held) + 2 * len(holder.blocks_by_pin)
    # The prompt stays as long as one of them does.
    own = len(holder.blocks_by_pin[first]) - 100
    assert holder.count_freeable(others, 10_000) == len(held) - 100 - own


@pytest.mark.parametrize("is_awaited", [False, True])
def test_a_request_without_the_prefix_cache_does_not_wait_for_its_own_pin(
    make_engine, monkeypatch, is_awaited
):
    """prompt_logprobs: all of it is computed anew, in other blocks."""
    skips = lambda request: request.request_id == "A-2"  # noqa: E731
    monkeypatch.setattr(Request, "get_skip_reading_prefix_cache", skips)
    engine = make_engine(num_blocks=101, extra_config={"policy": "adaptive"})
    hints = {"program_id": "A", "tool": "bash"}
    context = engine.turn("A-1", range(880), hints=hints)
    engine.add("R", range(5000, 5070), max_tokens=200, session_id="R")
    engine.step()
    assert pinned(engine) > 50
    if is_awaited:  # by a request that can use it: then it stays
        engine.add("A-3", [*context, 8], max_tokens=1, hints=hints)
    engine.add("A-2", [*context, 9], max_tokens=1, hints=hints)
    assert (pinned(engine) > 50) is is_awaited
    scheduled = engine.step().num_scheduled_tokens
    assert ("A-3" if is_awaited else "A-2") in scheduled
