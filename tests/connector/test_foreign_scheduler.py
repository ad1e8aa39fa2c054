"""Under a scheduler class that is not ours: still pins, still cannot wedge.

vLLM's own asks nothing; the one in `own_scheduler` asks the connector for order, room
and memory.
"""

from __future__ import annotations

import random

import pytest

from tests.connector.conftest import (
    FOREVER,
    HOLD_ALL,
    free,
    pinned,
    play_on_a_tiny_pool,
    totals,
)
from tests.connector.test_admission import add, step
from tests.connector.test_allocation import admission_order, lose_pins, start
from ttlcache.scheduling import admission
from ttlcache.types import Admission, Urgency
from ttlcache_connector.connector import TTLConnector

VLLM_OWN = "vllm.v1.core.sched.scheduler.Scheduler"
ASKING = "tests.connector.own_scheduler.OwnScheduler"


@pytest.fixture(params=[VLLM_OWN, ASKING], ids=["vllm", "asking"])
def scheduler_cls(request):
    return request.param


def test_pins_claims_and_expires(make_engine, clock, scheduler_cls):
    engine = make_engine(num_blocks=40, scheduler_cls=scheduler_cls)
    context = engine.turn("A-1", range(149), max_tokens=20, session_id="A")
    assert pinned(engine) == 10
    engine.turn("A-2", context + [7] * 30, session_id="A")
    assert totals(engine)["pins:claimed"] == 1
    assert totals(engine)["turns_identified:session"] == 2
    clock.advance(6.0)
    engine.step()
    assert free(engine) == 39


def test_does_not_wedge_when_pins_hold_everything(make_engine, scheduler_cls):
    engine = make_engine(
        num_blocks=31,
        scheduler_cls=scheduler_cls,
        extra_config=HOLD_ALL,
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


def test_one_that_asks_serves_pinned_then_older_programs_first(make_engine):
    # N is the youngest program and is queued first: vLLM's own would serve it first.
    engine = make_engine(
        num_blocks=200, max_num_seqs=1, extra_config=FOREVER, scheduler_cls=ASKING
    )
    start(engine, "A", 40)
    engine.run()
    lose_pins(engine)
    start(engine, "B", 40, base=2)
    engine.run()
    a, b = (list(engine.finished[f"{p}-1"].all_token_ids) for p in "AB")
    start(engine, "R", 40, max_tokens=10)
    engine.step()
    start(engine, "N", 40)
    engine.add("A-2", [*a, 1, 2], hints={"program_id": "A"})
    engine.add("B-2", [*b, 1, 2], hints={"program_id": "B"})
    assert admission_order(engine) == ["B-2", "A-2", "N-1"]
    assert totals(engine)["pins:claimed"] == 1


def test_one_that_asks_leaves_older_programs_their_pins(make_engine):
    # 9 blocks of A are pinned, R takes 7 and runs; D needs 19 of the 14 that are free.
    engine = make_engine(num_blocks=31, extra_config=FOREVER, scheduler_cls=ASKING)
    start(engine, "A", 140)
    engine.run()
    assert pinned(engine) == 9
    start(engine, "R", 100, max_tokens=12)
    engine.step()
    start(engine, "D", 290)
    while "R-1" not in engine.finished:
        assert [r.request_id for r in engine.scheduler.waiting] == ["D-1"]
        engine.step()
    assert pinned(engine) >= 9
    engine.run(max_steps=100)  # nothing runs: they give way
    assert "D-1" in engine.finished


def test_one_that_asks_holds_new_programs_back(make_engine, monkeypatch):
    """The scene of test_admission: room is left to A, whose tool runs, and to D."""
    monkeypatch.setattr(admission, "GROWTH_SHARE", 1.0)
    engine = make_engine(
        num_blocks=29,
        scheduler_cls=ASKING,
        extra_config={**FOREVER, "admission": "room-to-grow"},
    )
    for program in "VWXYZ":
        add(engine, program, 156, is_last_step=True)
        engine.run()
    add(engine, "A", 60)
    engine.run()
    add(engine, "D", 156, max_tokens=150)
    assert step(engine) == ["D-1"]
    request = add(engine, "E", 60)
    connector = engine.connector
    assert step(engine, 5) == []
    before = free(engine), pinned(engine)
    assert connector.admission(request, 4) is Admission.WAIT
    assert (free(engine), pinned(engine)) == before
    assert connector.eviction(4, request, Urgency.HELD_BACK) == 0
    add(engine, "A", 70, turn=2)
    assert step(engine) == ["A-2"]
    engine.run(max_steps=1000)
    assert "E-1" in engine.finished


@pytest.mark.parametrize("seed", range(6))
def test_one_that_asks_never_wedges(make_engine, clock, seed):
    rng = random.Random(seed)
    control = rng.choice(("none", "room-to-grow"))
    spec = {
        "scheduler_cls": ASKING,
        "extra_config": HOLD_ALL | {"admission": control},
    }
    play_on_a_tiny_pool(make_engine, rng, 6, clock, **spec)


def test_the_guard_and_the_queue_ask_the_connector(make_engine, monkeypatch):
    """A class derived from ours may answer in its own way."""
    asked = []
    for name in ("priority", "admission", "eviction"):
        ours = getattr(TTLConnector, name)

        def answer(self, *args, name=name, ours=ours):
            asked.append(name)
            return ours(self, *args)

        monkeypatch.setattr(TTLConnector, name, answer)
    engine = make_engine(num_blocks=21, extra_config=FOREVER)
    start(engine, "A", 150)
    engine.run()
    start(engine, "B", 100)
    engine.step()
    start(engine, "C", 250)
    engine.run()
    assert set(asked) == {"priority", "admission", "eviction"}
