"""Any history of programs on vLLM's real scheduler: no wedge, no leak.

`python -m bench wedge` plays as many randomised schedules as you like; hypothesis plays
the same moves in any order, and shrinks what breaks. After each step all invariants
hold; at the end every block comes back.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from vllm.v1.request import RequestStatus

from bench.stress.wedge.engine import ScheduleFailure
from bench.stress.wedge.run import play
from bench.stress.wedge.schedule import Schedule
from bench.stress.wedge.spec import random_engine
from ttlcache.types import Urgency
from ttlcache_connector.blocks import pinned
from ttlcache_connector.role.allocate_slots import AllocationGuard

FIRST_SEED = 1_000_000
#: Fifty schedules each; the first few for every commit.
CHUNKS = [
    pytest.param(chunk, marks=pytest.mark.nightly if chunk >= 2 else ())
    for chunk in range(10)
]


def failures(seeds: Iterable[int]) -> str:
    outcomes = [outcome for outcome in map(play, seeds) if outcome.failure is not None]
    return "\n".join(f"seed {each.seed}: {each.failure}" for each in outcomes)


@pytest.mark.parametrize("chunk", CHUNKS)
def test_no_wedge_no_leak_no_broken_invariant(chunk):
    first = FIRST_SEED + 50 * chunk
    assert failures(range(first, first + 50)) == ""


MOVES = (
    *("new_program", "next_turn", "abort", "retry", "branch", "parallel_samples"),
    *("jump", "end", "reset", "rewrite", "stream"),
)


class AnySchedule(RuleBasedStateMachine):
    """Moves in any order, on any engine; every other one loads KV from elsewhere."""

    loads_aborted = 0

    @initialize(seed=st.integers(0, 10_000), loads=st.booleans())
    def start(self, seed, loads):
        self.schedule = Schedule(seed)
        rng = self.schedule.rng
        self.schedule.start(random_engine(rng, load_share=float(loads)))

    @property
    def engine(self):
        return self.schedule.engine

    def loading(self):
        """Requests whose KV is on its way, or has arrived while they do not run."""
        status = RequestStatus.WAITING_FOR_REMOTE_KVS
        requests = self.engine.scheduler.requests
        return sorted(rid for rid, r in requests.items() if r.status is status)

    @rule(move=st.sampled_from(MOVES), steps=st.sampled_from([0, 1, 1, 2, 5]))
    def do(self, move, steps):
        getattr(self.schedule, move)()
        self.schedule.steps(steps)

    @precondition(lambda self: self.engine.elsewhere is not None)
    @rule(pace=st.sampled_from([None, 0.0, 0.5, 1.0]), steps=st.sampled_from([0, 1, 2]))
    def load_while_an_old_program_grows(self, pace, steps):
        if pace is not None:
            self.engine.elsewhere.pace = pace
        self.schedule.pile_up()
        self.schedule.steps(steps)

    @precondition(lambda self: self.loading())
    @rule(data=st.data(), steps=st.sampled_from([0, 1, 3]))
    def abort_a_load(self, data, steps):
        AnySchedule.loads_aborted += 1
        self.engine.harness.abort(data.draw(st.sampled_from(self.loading())))
        self.schedule.steps(steps)

    def teardown(self):
        if hasattr(self, "schedule"):
            self.schedule.finish()


ALL = settings(
    max_examples=40,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


def test_no_history_breaks_anything():
    AnySchedule.loads_aborted = 0
    run_state_machine_as_test(AnySchedule, settings=ALL)
    assert AnySchedule.loads_aborted


def test_both_searches_find_a_leak(monkeypatch):
    original = pinned.free_tail_first
    monkeypatch.setattr(
        pinned, "free_tail_first", lambda pool, blocks: original(pool, blocks[:-1])
    )
    assert "references, expected" in failures(range(10))
    quick = settings(ALL, max_examples=5, phases=[Phase.generate])
    with pytest.raises(ScheduleFailure, match=r"references|free"):
        run_state_machine_as_test(AnySchedule, settings=quick)


def test_the_search_finds_a_wedge(monkeypatch):
    original = AllocationGuard.urgency

    def alike(*asked):  # pins do not give way when nothing runs
        found = original(*asked)
        return Urgency.WAITING if found is Urgency.STALLED else found

    monkeypatch.setattr(AllocationGuard, "urgency", alike)
    assert "wedge" in failures(range(30))


def test_the_search_finds_loads_that_vllm_keeps_too_little_for(monkeypatch):
    monkeypatch.setattr(AllocationGuard, "window_reserve_gap_blocks", lambda _self: 0)
    assert "wedge" in failures((1980, 2360))
