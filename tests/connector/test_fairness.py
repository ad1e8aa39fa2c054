"""docs/scheduling.md: how long a request waits for endless programs, by adversaries.

Virtual time on vLLM's real scheduler, two slots, no pressure on memory. The last
resort (`max_queue_wait_s`) is out of reach, so what serves the victim is the quantum
alone; each adversary starves it when the quantum is out of reach, too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.connector.conftest import FOREVER, totals
from ttlcache.types import Urgency

STEP_S = 0.1
TURN_TOKENS = 10
SLOTS = 2
#: A turn from admission to finish: its steps, and those that async outputs lag.
TURN_S = (TURN_TOKENS + 2) * STEP_S
QUANTUM = 3
NEVER = 10**6
CROWD = 6


@dataclass
class Crowd:
    """Programs without end: whatever finishes comes back at once, and grown."""

    engine: Any
    clock: Any
    contexts: dict[str, list[int]] = field(default_factory=dict)
    turns: dict[str, int] = field(default_factory=dict)

    def start(self, count: int) -> None:
        for index in range(count):
            self.contexts[f"A{index}"] = [index + 1] * 20
            self.send(f"A{index}")

    def send(self, name: str) -> None:
        self.turns[name] = self.turns.get(name, 0) + 1
        self.engine.add(
            f"{name}/{self.turns[name]}",
            self.contexts[name],
            max_tokens=TURN_TOKENS,
            hints={"program_id": name, "tool": "ls"},
        )

    def step(self) -> None:
        self.engine.step()
        self.clock.advance(STEP_S)
        for request_id in list(self.engine.finished):
            name = request_id.split("/")[0]
            if name in self.contexts:
                request = self.engine.finished.pop(request_id)
                self.contexts[name] = list(request.all_token_ids)
                self.send(name)

    def waited_s(self, request: Any, horizon_s: float) -> float:
        """Seconds until the victim got a slot, `inf` if not within the horizon."""
        began_s = self.clock.now_s()
        while self.clock.now_s() - began_s < horizon_s:
            self.step()
            if request.num_computed_tokens:
                return self.clock.now_s() - began_s
        return float("inf")


@pytest.fixture(params=["ttl-aware", "weighted-arrival", "program-fcfs"])
def ordering(request):
    return request.param


@pytest.fixture
def crowd(make_engine, clock, async_scheduling, ordering):
    def make(quantum_turns: int) -> Crowd:
        engine = make_engine(
            num_blocks=400,
            max_num_seqs=SLOTS,
            async_scheduling=async_scheduling,
            extra_config={
                **FOREVER,
                "ordering": ordering,
                "quantum_turns": quantum_turns,
                "max_queue_wait_s": 1e6,
            },
        )
        return Crowd(engine, clock)

    return make


def bound_s(contexts: int) -> float:
    """What docs/scheduling.md promises, with `SLOTS` turns at a time."""
    return TURN_S + contexts * (QUANTUM + 1) * TURN_S / SLOTS


def newcomer(crowd: Crowd) -> Any:
    return crowd.engine.add("new", range(500, 520), hints={"program_id": "new"})


def behind_endless_seniors(crowd: Crowd, horizon_s: float) -> float:
    """A newcomer against six older programs that always have a pin to claim."""
    crowd.start(CROWD)
    for _ in range(3 * TURN_TOKENS):
        crowd.step()
    return crowd.waited_s(newcomer(crowd), horizon_s)


def behind_pinned_juniors(crowd: Crowd, horizon_s: float) -> float:
    """The oldest program comes back without a pin; all the younger ones have one."""
    engine = crowd.engine
    context = engine.turn("old/1", range(500, 520), hints={"program_id": "old"})
    assert engine.controller.memory.reclaim(10_000, Urgency.RUNNING, "")
    crowd.start(CROWD)
    for _ in range(3 * TURN_TOKENS):
        crowd.step()
    back = engine.add("old/2", [*context, 1], hints={"program_id": "old"})
    return crowd.waited_s(back, horizon_s)


def behind_endless_sub_agents(crowd: Crowd) -> tuple[float, int]:
    """A parent spawns three times as many sub-agents as can ever be served.

    Returns:
        How long a newcomer waits, and how many requests were there before it.
    """
    crowd.engine.turn("parent/1", range(500, 520), hints={"program_id": "parent"})
    spawn_every = TURN_TOKENS // SLOTS // 3
    steps = 0

    def step() -> None:
        nonlocal steps
        if steps % spawn_every == 0:
            hints = {"program_id": f"child-{steps}", "parent_id": "parent"}
            tokens = [600 + steps] * 20
            crowd.engine.add(f"c{steps}", tokens, max_tokens=TURN_TOKENS, hints=hints)
        steps += 1
        Crowd.step(crowd)

    crowd.step = step  # type: ignore[method-assign]
    for _ in range(2 * TURN_TOKENS):
        crowd.step()
    before = len(crowd.engine.scheduler.requests)
    return crowd.waited_s(newcomer(crowd), horizon_s=1000.0), before


ADVERSARIES = {
    "seniors": (behind_endless_seniors, bound_s(CROWD)),
    "juniors": (behind_pinned_juniors, bound_s(CROWD)),
}


@pytest.mark.parametrize("adversary", ADVERSARIES)
def test_everybody_is_overtaken_for_a_quantum_and_a_turn_at_most(crowd, adversary):
    play, bound = ADVERSARIES[adversary]
    assert play(crowd(QUANTUM), horizon_s=2 * bound) <= bound


@pytest.mark.parametrize("adversary", ADVERSARIES)
def test_without_the_quantum_each_adversary_starves_somebody(
    crowd, adversary, ordering
):
    play, bound = ADVERSARIES[adversary]
    waited = play(crowd(NEVER), horizon_s=2 * bound)
    if adversary == "juniors" and ordering == "program-fcfs":
        assert waited <= TURN_S  # there a younger program never overtakes
    else:
        assert waited == float("inf")


def test_sub_agents_stand_in_the_order_of_arrival(crowd):
    waited_s, before = behind_endless_sub_agents(crowd(NEVER))
    assert before > 2 * SLOTS
    assert waited_s <= TURN_S * (1 + before / SLOTS)


def test_a_program_keeps_its_place_until_its_quantum_is_used_up(make_engine, clock):
    # Scenario, one slot, two turns of service to a quantum:
    #   1. A runs two turns while B, who came later, waits.
    #   2. A's quantum is used up: its third turn goes behind B, pin or not.
    #   3. Once admitted it stands before those who came after its second turn.
    engine = make_engine(
        num_blocks=200,
        max_num_seqs=1,
        extra_config={
            "ordering": "ttl-aware",
            **FOREVER,
            "quantum_turns": 2,
        },
    )

    def send(name: str) -> None:
        tokens = [ord(name[0])] * 20
        hints = {"program_id": name[0], "tool": "ls"}
        engine.add(name, tokens, max_tokens=TURN_TOKENS, hints=hints)

    def until(name: str) -> None:
        while name not in engine.finished:
            engine.step()
            clock.advance(STEP_S)

    send("A1")
    engine.step()
    send("B1")
    until("A1")
    send("A2")
    until("A2")
    assert "B1" not in engine.finished
    send("A3")
    send("C1")
    until("A3")
    assert "B1" in engine.finished
    assert "C1" not in engine.finished
    send("A4")
    until("A4")
    assert "C1" not in engine.finished
    assert totals(engine)["quanta_used_up"] == 2
