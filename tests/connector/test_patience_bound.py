"""docs/scheduling.md: an engine that waits for pins' next turns keeps its bounds.

Virtual time on vLLM's real scheduler. One program of short turns and slow tools holds a
context that takes long to rebuild; a newcomer does not fit beside it.
"""

from __future__ import annotations

from typing import Any

import pytest

STEP_S = 0.1
TURN_S = 1.0
GAP_S = 8.0
PATIENCE_S = 10.0
QUANTUM = 4
NEVER = 10**6
CONTEXT = 40 * 16


@pytest.fixture
def make(make_engine, async_scheduling):
    def engine(**config: Any) -> Any:
        extra = {"policy": "adaptive", "quantum_turns": NEVER, "max_queue_wait_s": 1e6}
        engine = make_engine(
            num_blocks=65,
            async_scheduling=async_scheduling,
            extra_config={**extra, **config},
        )
        engine.controller.costs.prefill_s = lambda tokens, cached=0: PATIENCE_S
        return engine

    return engine


class Slow:
    """A program that never ends: a turn, then a tool."""

    def __init__(self, engine: Any, clock: Any) -> None:
        self.engine, self.clock = engine, clock
        self.context = list(range(1000, 1000 + CONTEXT))
        self.turns = 0
        self.back_at_s = clock.now_s()

    def step(self) -> None:
        done = self.engine.finished.pop(f"slow/{self.turns}", None)
        if done is not None:
            self.context = list(done.all_token_ids)[: CONTEXT + 16]
            self.back_at_s = self.clock.now_s() + GAP_S
        if self.clock.now_s() >= self.back_at_s:
            self.back_at_s = float("inf")
            self.turns += 1
            self.engine.add(
                f"slow/{self.turns}",
                self.context,
                max_tokens=int(TURN_S / STEP_S),
                hints={"program_id": "slow", "tool": "make"},
            )
        self.engine.step()
        self.clock.advance(STEP_S)


def newcomers_wait_s(engine: Any, clock: Any, horizon_s: float = 1000.0) -> float:
    slow = Slow(engine, clock)
    while not slow.turns or f"slow/{slow.turns}" in engine.scheduler.requests:
        slow.step()
    came_s = clock.now_s()
    request = engine.add("new", range(5000, 5000 + CONTEXT), hints={"program_id": "N"})
    while clock.now_s() - came_s < horizon_s:
        slow.step()
        if request.num_computed_tokens:
            return clock.now_s() - came_s
    return float("inf")


def test_who_is_waited_for_uses_up_its_quantum(make, clock):
    """L is a turn and the patience with its pin."""
    turn_s = TURN_S + 3 * STEP_S
    longest_s = turn_s + PATIENCE_S
    waited_s = newcomers_wait_s(make(quantum_turns=QUANTUM), clock)
    assert GAP_S < waited_s <= longest_s + QUANTUM * turn_s + longest_s


def test_without_a_quantum_it_would_wait_for_ever(make, clock):
    assert newcomers_wait_s(make(), clock, 300.0) == float("inf")


def test_there_is_no_patience_once_somebody_is_overdue(make, clock):
    waited_s = newcomers_wait_s(make(max_queue_wait_s=2.0), clock)
    assert waited_s <= 2.0 + 3 * STEP_S
