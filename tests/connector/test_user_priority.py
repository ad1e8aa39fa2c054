"""`--scheduling-policy priority`: pins do not turn the clients' priorities around."""

from __future__ import annotations

import pytest

from tests.connector.conftest import pinned

NEW = 40 * 16


@pytest.fixture
def engine(make_engine, async_scheduling):
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


def waits(engine, priority: int) -> bool:
    prompt = range(5000, 5000 + NEW)
    request = engine.add("new", prompt, hints={"program_id": "new"}, priority=priority)
    for _ in range(5):
        engine.step()
    assert "runs" in engine.scheduler.requests
    return not request.num_computed_tokens


def test_a_request_of_higher_priority_takes_an_older_programs_pin(engine):
    assert not waits(engine, priority=0)
    assert kept(engine) < 40


def kept(engine) -> int:
    """Blocks of the old program's pin."""
    pins = engine.controller.pins
    return sum(p.kv_blocks for p in pins if p.program.program_id == "old")


@pytest.mark.parametrize("priority", [5, 9])
def test_one_of_the_same_or_a_lower_priority_does_not(engine, priority):
    assert waits(engine, priority)
    assert kept(engine) == 40
