"""Estimators against hand-worked numbers, numpy and lifelines."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lifelines import KaplanMeierFitter
from lifelines.utils import restricted_mean_survival_time

from tests.curves import kaplan_meier
from ttlcache.estimators.memoryfulness import Memoryfulness
from ttlcache.estimators.plain_cache import PlainCache
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
    for tau_s, held_s in zip(curve.times, curve.held_s, strict=True):
        rmst = restricted_mean_survival_time(fitted, t=tau_s)
        assert held_s == pytest.approx(rmst, abs=1e-9)


def test_a_curve_without_an_ended_gap_is_empty():
    assert EMPTY_CURVE.at(5.0) == 1.0
    assert len(kaplan_meier([3.0], [False]).times) == 0


def test_plain_vllm_keeps_of_a_turn_what_fits_beside_contexts_used_since():
    cache = PlainCache()
    cache.on_turn_end("mine", 400, now_s=1.0)
    assert cache.hit_tokens("mine", 1.0, 1000) == 1000
    cache.on_arrival("r", "other", 300, now_s=2.0)
    cache.on_turn_end("other", 350, now_s=3.0)  # its context counts once
    cache.on_leave("r")
    cache.on_arrival("next", "mine", 400, now_s=4.0)  # so does not the turn's own
    assert cache.hit_tokens("mine", 1.0, 1000) == 650
    cache.on_program_start("other", 100)  # it shares a head with some program
    assert cache.hit_tokens("mine", 1.0, 1000) == 750
    assert cache.hit_tokens("mine", 3.5, 1000) == 1000, "used before"
    cache.on_program_start("mine", 100)
    cache.on_turn_end("long", 2000, now_s=5.0)
    assert cache.hit_tokens("mine", 1.0, 1000) == 100, "others use the head"


def test_requests_that_wait_here_are_under_way_in_plain_vllm():
    cache = PlainCache()
    cache.on_arrival("r", "waits", 30, now_s=1.0)
    cache.on_turn_end("mine", 400, now_s=2.0)
    assert cache.hit_tokens("mine", 2.0, 1000) == 600, "as long as a mean context"
    cache.on_leave("r")
    assert cache.hit_tokens("mine", 2.0, 1000) == 1000


def test_what_ended_here_goes_on_in_a_plain_vllm_that_is_late():
    cache = PlainCache()
    cache.on_turn_end("over", 300, now_s=1.0)
    cache.on_turn_end("idle", 300, now_s=1.5)
    cache.on_program_end("over")
    cache.on_turn_end("mine", 400, now_s=2.0)
    cache.on_step(0.0, 2.0, prefills=True)
    cache.on_saved(20.0)
    cache.on_step(2.0, 9.0, prefills=True)
    assert cache.hit_tokens("mine", 2.0, 1000) == 700, "an eighth of 20 s"
    cache.on_step(9.0, 14.0, prefills=False)
    cache.on_step(22.0, 30.0, prefills=True)
    assert cache.hit_tokens("mine", 2.0, 1000) == 1000, "13 s to catch up"
