"""Estimators against hand-worked numbers, numpy and lifelines."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lifelines import KaplanMeierFitter
from lifelines.utils import restricted_mean_survival_time

from tests.curves import kaplan_meier
from ttlcache.clock import VirtualClock
from ttlcache.estimators.lru_backlog import Backlog
from ttlcache.estimators.memoryfulness import Memoryfulness
from ttlcache.estimators.sliding_mean import SlidingMean
from ttlcache.estimators.survival import EMPTY_CURVE


def test_sliding_mean_does_not_drift():
    mean = SlidingMean(window=10)
    mean.observe(1e16)  # swallows the small ones while it is in the sum
    for _ in range(25):
        mean.observe(0.1)
    assert mean.value == pytest.approx(0.1, abs=1e-12)


def numpy_eta(lengths):
    k = np.concatenate([np.arange(1, n + 1) for n in lengths])
    left = np.concatenate([n - np.arange(1, n + 1) for n in lengths])
    return float(-np.corrcoef(k, left)[0, 1])


def memory_of(lengths, window=1000):
    memory = Memoryfulness(window)
    for turns in lengths:
        memory.add(turns)
    return memory


@given(st.lists(st.integers(1, 400), min_size=1, max_size=60))
@settings(max_examples=300, deadline=None)
def test_eta_equals_numpy(lengths):
    memory = memory_of(lengths)
    if max(lengths) == 1:
        assert memory.eta == 1.0  # every pair is (1, 0): no variance
    else:
        assert memory.eta == pytest.approx(numpy_eta(lengths), abs=1e-9)


def test_eta_by_hand():
    # Pairs (1, 0), (1, 1), (2, 0): n=3, sums k=4, m=1, kk=6, mm=1, km=1.
    # cov = 3*1 - 4*1 = -1; var k = 18-16 = 2; var m = 3-1 = 2; corr = -1/2.
    assert memory_of([1, 2]).eta == pytest.approx(0.5, abs=1e-12)
    assert memory_of([0, -3]).eta == 1.0  # of no programs


def test_eta_window_forgets_whole_programs():
    memory = memory_of([50, 3, 9, 4, 0], window=3)
    assert memory.eta == pytest.approx(numpy_eta([3, 9, 4]), abs=1e-9)
    assert memory.avg_turns == pytest.approx(16 / 3)
    assert memory_of([0, -3]).avg_turns == 0.0


def test_kaplan_meier_by_hand():
    # 5 gaps: 1, 2, 2 ended, one given up at 2, one at 3.
    # t=1: 5 at risk, S = 4/5. t=2: 4 at risk (the censored one too), 2 end: S = 2/5.
    curve = kaplan_meier([1, 2, 2, 2, 3], [True, True, True, False, False])
    assert curve.times.tolist() == [1.0, 2.0]
    assert curve.survival.tolist() == pytest.approx([0.8, 0.4])
    assert curve.held_s.tolist() == pytest.approx([1.0, 1.8])  # 1, then + 0.8 * 1
    found = [curve.at(t) for t in (0.9, 1.0, 1.9, 99.0)]
    assert found == pytest.approx([1.0, 0.8, 0.8, 0.4])
    # E[min(T, 1.5)] = 1 + 0.8 / 2; beyond the last event S stays 0.4.
    assert curve.restricted_mean(1.5) == pytest.approx(1.4)
    assert curve.restricted_mean(4.0) == pytest.approx(1.8 + 0.8)
    assert curve.restricted_mean(-1.0) == 0.0


@pytest.mark.parametrize("seed", range(100))
def test_kaplan_meier_equals_lifelines(seed):
    rng = np.random.default_rng(seed)
    n = int(rng.integers(2, 200))
    # Rounded, so that there are ties between and among events and censorings.
    durations = np.round(rng.lognormal(0.0, 1.0, n), 1)
    observed = rng.random(n) < rng.uniform(0.2, 1.0)
    observed[0] = True
    curve = kaplan_meier(durations, observed)
    fitted = KaplanMeierFitter().fit(durations, observed)
    expected = fitted.survival_function_at_times(curve.times).to_numpy()
    np.testing.assert_allclose(curve.survival, expected, atol=1e-12)
    assert set(curve.times) == set(durations[observed])
    tau_s = float(np.median(durations))
    rmst = restricted_mean_survival_time(fitted, t=tau_s)
    assert curve.restricted_mean(tau_s) == pytest.approx(rmst, abs=1e-9)


def test_conditional_curve_by_hand():
    # Gaps 1, 2, 4, 8; after 2 s two are left: 2 s and 6 s more.
    curve = kaplan_meier([1, 2, 4, 8], [True] * 4).given_survival(2.0)
    assert curve.times.tolist() == [2.0, 6.0]
    assert curve.survival.tolist() == [0.5, 0.0]
    assert curve.held_s.tolist() == [2.0, 4.0]  # 2, then + 0.5 * 4
    # And at its ends.
    curve = kaplan_meier([1, 2], [True, True])
    assert curve.given_survival(0.0) is curve
    assert curve.given_survival(-1.0) is curve
    assert curve.given_survival(0.5).times.tolist() == [0.5, 1.5]
    assert curve.given_survival(2.0) is EMPTY_CURVE
    assert curve.restricted_mean(math.inf) == 1.5
    assert EMPTY_CURVE.at(5.0) == 1.0
    assert len(kaplan_meier([3.0], [False]).times) == 0


@pytest.mark.parametrize(
    ("saved_s", "idle_s", "left"),
    [
        (4.0, 1.0, 750),
        (4.0, 5.0, 0),
        (0.0, 0.0, 0),  # without a price nothing is left after a rest
    ],
)
def test_idle_seconds_work_a_backlog_off_in_proportion(saved_s, idle_s, left):
    clock = VirtualClock()
    backlog = Backlog(clock)
    arrived = backlog.on_arrival(5000)
    backlog.on_saved(1000, saved_s)
    clock.advance(10.0)
    assert backlog.tokens_before(0, 0) == 1000, "a request waits"
    backlog.on_wait_end(5000)
    backlog.on_running(5000)
    clock.advance(idle_s)
    for _ in range(2):  # from the next request on plain vLLM catches up no more
        arrived = backlog.on_arrival(0)
        clock.advance(5.0)
    assert backlog.tokens_before(arrived, 0) == left


def test_plain_vllm_serves_in_the_order_of_arrival():
    backlog = Backlog(VirtualClock())
    backlog.on_arrival(300)  # waits
    second = backlog.on_arrival(20)
    backlog.on_arrival(4000)  # comes later
    backlog.on_wait_end(20)
    assert backlog.tokens_before(second, 0) == 300
    backlog.on_wait_end(300)
    assert backlog.tokens_before(second, 0) == 0


def test_what_plain_vllm_is_late_with_is_at_most_a_context_a_program():
    backlog = Backlog(VirtualClock())
    arrived = backlog.on_arrival(20)
    backlog.on_arrival(1000)
    backlog.on_wait_end(20)
    backlog.on_running(500)
    backlog.on_saved(1_000_000, 9.0)
    assert backlog.tokens_before(arrived, 70) == 1000 + 500 + 70
    backlog.on_running(-500)
    assert backlog.tokens_before(arrived, 70) == 1000 + 70
