"""The contract of a retention policy as a test suite, for our policies and yours.

    from ttlcache.testing.policy_contract import PolicyContract

    class TestMine(PolicyContract):
        def make_policy(self):
            return Mine()

pytest collects the methods of the subclass; nothing here imports pytest.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator

import numpy as np

from ttlcache.clock import stopwatch_s
from ttlcache.estimators.costs import CostModel
from ttlcache.estimators.gap_history import GapHistory
from ttlcache.policies.base import Policy, View
from ttlcache.types import (
    APPROVAL_GAP,
    FINAL_GAP,
    USER_GAP,
    Decision,
    GapKey,
    Pressure,
    TurnFacts,
)

SHELL_GAP = GapKey("bash", "git")
GAP_KEYS = (
    SHELL_GAP,
    GapKey("search"),
    GapKey("never seen"),
    GapKey.parallel((SHELL_GAP, GapKey("search"))),
    USER_GAP,
    FINAL_GAP,
    APPROVAL_GAP,
)
IDLE = Pressure(pool_blocks=10_000, free_blocks=10_000)
BUSY = Pressure(10_000, 20, 6_000, num_running=5, num_waiting=20, memory_is_short=True)
PRESSURES = (Pressure(), IDLE, BUSY)

#: Bar of `decide` in seconds, as the median over `TIMED_DECISIONS`.
MAX_DECIDE_S = 100e-6
TIMED_DECISIONS = 200
TIMED_GAPS = 10_000


def filled_history(num_gaps: int = TIMED_GAPS) -> GapHistory:
    """Gaps of every kind of key: heavy-tailed, some never ended, some still open."""
    history = GapHistory(window=num_gaps, global_window=num_gaps)
    gaps_s = np.random.default_rng(7).lognormal(0.0, 1.5, num_gaps)
    for number, gap_s in enumerate(gaps_s.tolist()):
        # Two in three belong to one key, so that its own window is long as well.
        key = SHELL_GAP if number % 3 else GAP_KEYS[number // 3 % len(GAP_KEYS)]
        ended = number % 20 != 0
        history.observe(key, gap_s, completed=ended)
    for number in range(50):
        history.start(("open", number), SHELL_GAP, now_s=float(number))
    return history


def view_of(
    history: GapHistory, pressure: Pressure = BUSY, costs: CostModel | None = None
) -> View:
    """A view as a controller would hand it over."""
    if costs is None:
        costs = CostModel(prefill=[1e-4, 1e-9, 0.01], reload={"cpu": 1e-6})
        costs.observe_return_wait(2.0)
    return View(history, costs, 0.8, 10.0, pressure=pressure, now_s=60.0)


def turn_of(key: GapKey, **changes: float) -> TurnFacts:
    """A finished turn of 8,000 tokens in 500 blocks."""
    numbers = {"context_tokens": 8_000, "kv_blocks": 500, **changes}
    return TurnFacts("program", turn_index=3, gap_key=key, **numbers)  # type: ignore[arg-type]


def assert_valid(decision: Decision) -> None:
    assert isinstance(decision.ttl_s, float | int)
    assert not math.isnan(decision.ttl_s), decision
    assert decision.ttl_s >= 0.0, decision
    assert decision.reason, "a decision must say why"
    for name, value in decision.inputs.items():
        assert isinstance(name, str)
        assert isinstance(value, float | int), (name, value)


class PolicyContract:
    """Subclass, return your policy from `make_policy`, let pytest collect it."""

    def make_policy(self) -> Policy:
        """A fresh policy with the options to be tested."""
        raise NotImplementedError

    def _check_everywhere(self, view: View) -> None:
        policy = self.make_policy()
        for turn in _turns():
            assert_valid(policy.decide(turn, view))

    def test_has_a_name(self) -> None:
        assert self.make_policy().name

    def test_same_inputs_give_the_same_answer(self) -> None:
        policy, view = self.make_policy(), view_of(filled_history(2_000))
        turns = list(_turns())
        first = [policy.decide(turn, view) for turn in turns]
        # Backwards, so that an answer may not lean on the one before either.
        again = [policy.decide(turn, view) for turn in reversed(turns)]
        assert first == again[::-1]

    def test_another_instance_gives_the_same_answer(self) -> None:
        view, turn = view_of(filled_history(2_000)), turn_of(SHELL_GAP)
        answers = [self.make_policy().decide(turn, view) for _ in range(2)]
        assert answers[0] == answers[1]

    def test_reads_leave_the_history_alone(self) -> None:
        history = filled_history(2_000)
        keys = (None, SHELL_GAP)
        before = [history.durations(key).tolist() for key in keys]
        self._check_everywhere(view_of(history))
        assert [history.durations(key).tolist() for key in keys] == before

    def test_empty_history(self) -> None:
        for pressure in PRESSURES:
            self._check_everywhere(view_of(GapHistory(), pressure))

    def test_one_gap(self) -> None:
        history = GapHistory()
        history.observe(SHELL_GAP, 1.0)
        self._check_everywhere(view_of(history))

    def test_only_gaps_that_never_ended(self) -> None:
        history = GapHistory()
        for key in GAP_KEYS * 200:
            history.observe(key, 5.0, completed=False)
        self._check_everywhere(view_of(history))

    def test_ten_thousand_gaps(self) -> None:
        for pressure in PRESSURES:
            self._check_everywhere(view_of(filled_history(), pressure))

    def test_gaps_all_zero_or_huge(self) -> None:
        for gap_s in (0.0, 1e300):
            history = GapHistory()
            for key in GAP_KEYS * 200:
                history.observe(key, gap_s)
            self._check_everywhere(view_of(history))

    def test_extreme_costs(self) -> None:
        waits_long = CostModel()
        waits_long.observe_return_wait(1e300)
        for costs in (CostModel(), CostModel(prefill=[1e6, 1e6, 1e6]), waits_long):
            for history in (GapHistory(), filled_history(2_000)):
                self._check_everywhere(view_of(history, costs=costs))

    def test_decides_in_time(self) -> None:
        policy, history = self.make_policy(), filled_history()
        for key in (SHELL_GAP, GapKey("never seen")):
            turn, view = turn_of(key), view_of(history)
            samples = [_decide_s(policy, turn, view) for _ in range(TIMED_DECISIONS)]
            assert statistics.median(samples) <= MAX_DECIDE_S, policy.name


def _decide_s(policy: Policy, turn: TurnFacts, view: View) -> float:
    before_s = stopwatch_s()
    policy.decide(turn, view)
    return stopwatch_s() - before_s


def _turns() -> Iterator[TurnFacts]:
    for key in GAP_KEYS:
        yield turn_of(key)
        yield turn_of(key, context_tokens=0, kv_blocks=0)
        yield turn_of(key, context_tokens=10**9, kv_blocks=10**8)
        for waited_s in (-1.0, 0.7, 1e9, math.inf):
            yield turn_of(key, waited_s=waited_s)
        for eta_s in (-1.0, 0.0, 0.5, 1e9, math.inf, math.nan):
            yield turn_of(key, tool_eta_s=eta_s)
            yield turn_of(key, tool_eta_s=eta_s, waited_s=1.0)
