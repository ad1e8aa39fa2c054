"""Any history of programs on vLLM's real scheduler; hypothesis shrinks what breaks.

The same moves as `python -m bench wedge`, which plays more of them but shrinks nothing.
After each step all invariants hold; at the end every block comes back.
"""

from __future__ import annotations

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

from bench.stress.wedge import loading
from bench.stress.wedge.engine import ScheduleFailure
from bench.stress.wedge.schedule import Schedule
from bench.stress.wedge.spec import random_engine
from ttlcache_connector.blocks import pinned

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
    @rule(steps=st.sampled_from([0, 1, 2]))
    def load_while_an_old_program_grows(self, steps):
        self.schedule.pile_up()
        self.schedule.steps(steps)

    @precondition(lambda self: self.engine.elsewhere is not None)
    @rule(pace=st.sampled_from([0.0, 0.5, 1.0]))
    def the_link_changes(self, pace):
        self.engine.elsewhere.pace = pace

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
    assert AnySchedule.loads_aborted or not loading.VLLM_COPES


def test_a_leak_is_found(monkeypatch):
    original = pinned.free_tail_first
    monkeypatch.setattr(
        pinned, "free_tail_first", lambda pool, blocks: original(pool, blocks[:-1])
    )
    quick = settings(ALL, max_examples=5, phases=[Phase.generate])
    with pytest.raises(ScheduleFailure, match=r"references|free"):
        run_state_machine_as_test(AnySchedule, settings=quick)
