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
from ttlcache.config import LAST_RESORT_S
from ttlcache.scheduling.wait_bound import MIN_REQUESTS
from ttlcache.types import Urgency

STEP_S = 0.1
TURN_TOKENS = 10
SLOTS = 2
#: A turn from admission to finish: its steps, and those that async outputs lag.
TURN_S = (TURN_TOKENS + 2) * STEP_S
QUANTUM = 3
NEVER = 10**6
CROWD = 6
#: What docs/scheduling.md promises, with `SLOTS` turns at a time.
BOUND_S = TURN_S + CROWD * (QUANTUM + 1) * TURN_S / SLOTS


@dataclass
class Crowd:
    """Programs without end: whatever finishes comes back at once, and grown."""

    engine: Any
    clock: Any
    contexts: dict[str, list[int]] = field(default_factory=dict)
    turns: dict[str, int] = field(default_factory=dict)

    def start(self) -> None:
        for index in range(CROWD):
            self.contexts[f"A{index}"] = [index + 1] * 20
            self.send(f"A{index}")
        for _ in range(3 * TURN_TOKENS):
            self.step()

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

    def newcomers_wait_s(self, horizon_s: float) -> float:
        hints = {"program_id": "new"}
        request = self.engine.add("new", range(500, 520), hints=hints)
        return self.waited_s(request, horizon_s)

    def waited_s(self, request: Any, horizon_s: float) -> float:
        """Seconds until the victim got a slot, `inf` if not within the horizon."""
        began_s = self.clock.now_s()
        while self.clock.now_s() - began_s < horizon_s:
            self.step()
            if request.num_computed_tokens:
                return self.clock.now_s() - began_s
        return float("inf")


@pytest.fixture(params=["ttl-aware", "program-fcfs"])
def ordering(request):
    return request.param


@pytest.fixture
def crowd(make_engine, clock, async_scheduling, ordering):
    def make(quantum_turns: int, max_queue_wait_s: float = 1e6) -> Crowd:
        extra = {
            **FOREVER,
            "ordering": ordering,
            "quantum_turns": quantum_turns,
            "max_queue_wait_s": max_queue_wait_s,
        }
        engine = make_engine(
            num_blocks=400,
            max_num_seqs=SLOTS,
            async_scheduling=async_scheduling,
            extra_config=extra,
        )
        return Crowd(engine, clock)

    return make


def behind_endless_seniors(crowd: Crowd, horizon_s: float) -> float:
    """A newcomer against six older programs that always have a pin to claim."""
    crowd.start()
    return crowd.newcomers_wait_s(horizon_s)


def behind_pinned_juniors(crowd: Crowd, horizon_s: float) -> float:
    """The oldest program comes back without a pin; all the younger ones have one."""
    engine = crowd.engine
    context = engine.turn("old/1", range(500, 520), hints={"program_id": "old"})
    assert engine.controller.memory.reclaim(10_000, Urgency.RUNNING, "")
    crowd.start()
    back = engine.add("old/2", [*context, 1], hints={"program_id": "old"})
    return crowd.waited_s(back, horizon_s)


ADVERSARIES = [behind_endless_seniors, behind_pinned_juniors]


@pytest.mark.parametrize("adversary", ADVERSARIES)
def test_everybody_is_overtaken_for_a_quantum_and_a_turn_at_most(crowd, adversary):
    assert adversary(crowd(QUANTUM), horizon_s=2 * BOUND_S) <= BOUND_S


@pytest.mark.parametrize("adversary", ADVERSARIES)
def test_without_the_quantum_an_adversary_starves_somebody(crowd, adversary, ordering):
    waited_s = adversary(crowd(NEVER), horizon_s=2 * BOUND_S)
    if adversary is behind_pinned_juniors and ordering == "program-fcfs":
        assert waited_s <= TURN_S  # there a younger program never overtakes
    else:
        assert waited_s == float("inf")


def test_sub_agents_stand_in_the_order_of_arrival(crowd):
    """A parent spawns three times as many sub-agents as can ever be served."""
    crowd = crowd(NEVER)
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

    crowd.step = step
    for _ in range(2 * TURN_TOKENS):
        crowd.step()
    before = len(crowd.engine.scheduler.requests)
    assert before > 2 * SLOTS
    assert crowd.newcomers_wait_s(horizon_s=1000.0) <= TURN_S * (1 + before / SLOTS)


# --- the last resort: max_queue_wait_s

#: Overdue, it is next; a slot is free once a running turn has ended.
SLACK_S = (TURN_TOKENS + 3) * STEP_S
HORIZON_S = 60.0


@pytest.mark.parametrize("bound_s", [5.0, 20.0])
def test_the_bound_holds_against_endless_seniors(crowd, bound_s):
    """Without it they starve the newcomer, see above."""
    waited_s = behind_endless_seniors(crowd(NEVER, bound_s), HORIZON_S)
    assert bound_s <= waited_s <= bound_s + SLACK_S


def test_a_flood_of_short_programs_starves_no_long_one(make_engine, clock):
    """Its next turn is served while short ones keep coming.

    A program of six turns, more than any has made, expects as many more; newcomers,
    one after the other, expect one.
    """
    extra = {"policy": "none", "ordering": "expected-finish", "max_queue_wait_s": 1e6}
    engine = make_engine(num_blocks=200, max_num_seqs=1, extra_config=extra)

    def step() -> None:
        engine.step()
        clock.advance(STEP_S)

    def run_turn(name: str, prompt: list[int], **hints: object) -> list[int]:
        engine.add(name, prompt, max_tokens=TURN_TOKENS, hints=hints)
        while name not in engine.finished:
            step()
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
    while "long/next" not in engine.finished:
        assert clock.now_s() - start_s < HORIZON_S / 2
        while len(engine.scheduler.waiting) < 3:
            flood += 1
            hints = {"program_id": f"short{flood}", "is_last_step": True}
            prompt = [100 + flood] * 20
            engine.add(f"short{flood}", prompt, max_tokens=TURN_TOKENS, hints=hints)
        step()


def test_the_bound_is_learnt_above_a_tier_for_one_tenant_alone(make_engine):
    engine = make_engine(num_blocks=200, extra_config={"policy": "adaptive"})
    engine.add("a", range(20), max_tokens=1, session_id="a")
    for _ in range(MIN_REQUESTS):
        engine.controller.queue.wait_bound.on_allocated(3.0)
    assert engine.connector.max_wait_s() == LAST_RESORT_S
    engine.controller.tier_knowledge.on_reload_source("cpu")
    assert engine.connector.max_wait_s() == 6.0
    engine.add("b", range(20), max_tokens=1, session_id="b", cache_salt="other")
    assert engine.connector.max_wait_s() == LAST_RESORT_S


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
    assert list(engine.finished) == ["running", "w0", "w1", "w2", "w3"]
    assert totals(engine)["overdue_requests"] == 4
