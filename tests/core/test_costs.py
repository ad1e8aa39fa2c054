"""Costs: curves, online fits, robustness, price of memory, profiles."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ttlcache.estimators.costs import KEPT_WINDOW, MIN_LOST, STEP_TOKENS, CostModel
from ttlcache.estimators.step_fit import Step
from ttlcache.types import Pressure

PROFILE = {"prefill": [1e-4, 1e-9, 0.01], "reload": {"cpu": 1e-6}}


def curves(costs):
    lengths = (1, 1_000, 50_000, 10**6)
    reloads = [costs.reload_s("cpu", n) for n in lengths]
    return [[costs.prefill_s(n) for n in lengths], reloads]


def test_prefill_by_hand():
    costs = CostModel(**PROFILE)
    # 10,000 tokens: 1 + 0.1 + 0.01 s
    assert costs.prefill_s(10_000) == pytest.approx(1.11)
    # With 4,000 there: 6,000 * 1e-4 + (1e8 - 1.6e7) * 1e-9 + 0.01
    assert costs.prefill_s(10_000, 4_000) == pytest.approx(0.6 + 0.084 + 0.01)
    assert costs.prefill_s(4_000, 4_000) == 0.0
    assert costs.prefill_s(0) == costs.prefill_s(-5) == 0.0


def test_recovery_is_the_cheaper_way():
    costs = CostModel(**PROFILE)
    assert costs.recovery_s(10_000, "cpu") == costs.reload_s("cpu", 10_000) == 0.01
    assert costs.recovery_s(10_000) == costs.prefill_s(10_000)
    assert costs.reload_s("disk", 10_000) == math.inf
    assert costs.recovery_s(10_000, "disk") == costs.prefill_s(10_000)
    slow = CostModel(reload={"disk": 1.0})
    assert slow.recovery_s(10_000, "disk") == slow.prefill_s(10_000)


def true_prefill_s(prompt, cached=0):
    steps = -(-(prompt - cached) // 2048)
    pairs = prompt**2 - cached**2
    return 0.02 * steps + 3e-5 * (prompt - cached) + 4e-10 * pairs


def observe_prompt(costs, prompt, cached, seconds_of):
    """A prompt, `cached` tokens of it there, is computed alone, step by step."""
    for start in range(cached, prompt, STEP_TOKENS):
        stop = min(start + STEP_TOKENS, prompt)
        step = Step(0.0, prompts=[("r", start, stop)])
        costs.observe_step(step, seconds_of(stop, start))


def test_prefill_is_learned_from_a_wrong_seed():
    rng = np.random.default_rng(0)
    costs = CostModel(prefill=[1e-3, 1e-8, 0.0])
    for _ in range(600):
        cached = int(rng.integers(0, 50_000))
        prompt = cached + int(rng.integers(200, 20_000))
        noise = 1.0 + 0.05 * rng.standard_normal()

        def seconds_of(stop, start, noise=noise):
            return true_prefill_s(stop, start) * noise

        observe_prompt(costs, prompt, cached, seconds_of)
    for prompt, cached in ((2_000, 0), (20_000, 0), (60_000, 50_000), (60_000, 0)):
        # The curve does not know how full the last step is.
        expected_s = true_prefill_s(prompt, cached)
        assert costs.prefill_s(prompt, cached) == pytest.approx(expected_s, rel=0.15)


def test_lengths_never_seen_follow_the_seed_s_shape():
    costs = CostModel(prefill=[1e-4, 0.0, 0.0])
    for _ in range(200):
        observe_prompt(costs, 2_000, 0, lambda *_: 0.02)  # ten times as fast
    assert costs.prefill_s(2_000) == pytest.approx(0.02, rel=0.02)
    assert costs.prefill_s(64_000) == pytest.approx(0.64, rel=0.1)


def test_stalls_do_not_bend_the_curve_but_a_lasting_change_gets_through():
    rng = np.random.default_rng(1)
    costs = CostModel()

    def observe(number, factor, stall_s):
        for each in range(number):
            prompt = int(rng.integers(500, 30_000))
            late_s = stall_s if each % 20 == 5 else 0.0

            def seconds_of(stop, start, late_s=late_s):
                true_s = factor * true_prefill_s(stop, start)
                return true_s if start else true_s + late_s

            observe_prompt(costs, prompt, 0, seconds_of)

    # One in twenty is 30 s late; unclipped, 10,000 tokens would read 1.9 s.
    observe(500, 1.0, stall_s=30.0)
    expected_s = true_prefill_s(10_000)
    assert costs.prefill_s(10_000) == pytest.approx(expected_s, rel=0.25)
    observe(1500, 5.0, stall_s=0.0)
    assert costs.prefill_s(10_000) == pytest.approx(5 * expected_s, rel=0.15)


@pytest.mark.parametrize(
    ("prompt", "cached", "reloaded", "seconds"),
    [
        *((1000, 0, 1000, wrong) for wrong in (0.0, -1.0, math.nan, math.inf)),
        *((0, 0, 0, 1.0), (-5, 0, 0, 1.0), (10, 10, 0, 1.0)),
        *((10, 20, 0, 1.0), (10, -1, 0, 1.0)),
    ],
)
def test_nonsense_measurements_are_ignored(prompt, cached, reloaded, seconds):
    costs = CostModel(**PROFILE)
    before = curves(costs)
    costs.observe_step(Step(0.0, prompts=[("r", cached, prompt)]), seconds)
    for tier in ("cpu", "disk"):
        costs.observe_reload(tier, reloaded, seconds)
    assert curves(costs) == before


@given(
    st.lists(
        st.tuples(st.integers(1, 10**7), st.integers(0, 10**7), st.floats(1e-9, 1e6)),
        max_size=60,
    )
)
@settings(max_examples=200, deadline=None)
def test_curves_stay_non_negative_and_rise(rows):
    costs = CostModel()
    for new, cached, seconds in rows:
        step = Step(0.0, prompts=[("r", cached, cached + new)])
        costs.observe_step(step, seconds)
        costs.observe_reload("cpu", new, seconds)
    for curve in curves(costs):
        assert 0.0 <= curve[0] <= curve[-1]
        assert curve == sorted(curve)


def test_reload_is_learned_per_tier_and_stalls_do_not_count():
    costs = CostModel()
    costs.observe_reload("cpu", 10_000, 0.02)
    assert costs.reload_s("cpu", 20_000) == pytest.approx(0.04)
    for number in range(32):
        costs.observe_reload("cpu", 10_000, 0.01 if number % 3 else 10.0)
        costs.observe_reload("disk", 1_000, 0.1)
    assert costs.reload_s("cpu", 30_000) == pytest.approx(0.03)
    assert costs.reload_s("disk", 30_000) == pytest.approx(3.0)


def test_the_queueing_delay_is_a_sliding_mean():
    costs = CostModel()
    assert costs.queueing_delay_s == 0.0
    for wait_s in (1.0, 3.0, -1.0, math.nan, math.inf):
        costs.observe_return_wait(wait_s)
    assert costs.queueing_delay_s == 2.0
    for _ in range(1000):
        costs.observe_return_wait(0.0)
    assert costs.queueing_delay_s == 0.0


@pytest.mark.parametrize(
    ("pressure", "expected"),
    [
        # 50 of 1,000 blocks delay each who waits by a twentieth of a second a second;
        # a second of recovery delays 10 who wait, 4 who run and itself: 15 / 10.
        ({"num_waiting": 10}, (0.05, 1.5)),
        ({"num_waiting": 1}, (0.05, 6.0)),
        ({"num_waiting": 10, "num_running": 0}, (0.05, 1.1)),
        # Nobody waits, however full the pool is.
        ({"num_waiting": 0}, (0.0, 5.0)),
        # They wait for a batch slot, not for memory; or the head does lack some.
        ({"free_blocks": 500, "num_waiting": 10}, (0.0, 5.0)),
        ({"free_blocks": 500, "num_waiting": 10, "memory_is_short": True}, (0.05, 1.5)),
        ({"free_blocks": 100, "num_waiting": 10}, (0.05, 1.5)),  # the last tenth
        # Never beyond the pool.
        ({"pool_blocks": 10, "num_waiting": 1}, (1.0, 6.0)),
        ({"pool_blocks": 0, "num_waiting": 1}, None),  # unknown
    ],
)
def test_memory_price_by_hand(pressure, expected):
    known = {"pool_blocks": 1000, "num_running": 4, **pressure}
    assert CostModel().memory_price(Pressure(**known), 50) == expected


# --- what a lower tier keeps ---------------------------------------------------------


def test_a_tier_is_believed_until_returns_say_otherwise():
    costs = CostModel(**PROFILE)
    for _ in range(MIN_LOST - 1):
        costs.observe_lost(1000, is_found=False)
        assert costs.kept_share == 1.0
    costs.observe_lost(0, is_found=False)  # nothing was lost
    assert costs.kept_share == 1.0
    costs.observe_lost(1000, is_found=False)
    assert costs.kept_share == 0.0


def test_the_share_is_of_tokens_of_recent_returns():
    costs = CostModel(**PROFILE)
    for _ in range(MIN_LOST):
        costs.observe_lost(5000, is_found=True)
    for _ in range(KEPT_WINDOW - 2):
        costs.observe_lost(1000, is_found=False)
    costs.observe_lost(3000, is_found=True)
    # One of the first is left in the window.
    expected = (5000 + 3000) / (5000 + 3000 + (KEPT_WINDOW - 2) * 1000)
    assert costs.kept_share == pytest.approx(expected)


def test_recovery_is_a_reload_as_often_as_the_tier_keeps_what_it_got():
    costs = CostModel(prefill=[1e-4, 0.0, 0.0], reload={"cpu": 1e-5, "slow": 1})
    # 10,000 tokens: one second of prefill, a tenth of a second of reload.
    for tier in (None, "disk", "slow"):
        assert costs.expected_rebuild(10_000, tier) == pytest.approx((1.0, 0.0))
    assert costs.expected_rebuild(10_000, "cpu") == pytest.approx((0.0, 0.1))
    for number in range(MIN_LOST):
        costs.observe_lost(1000, is_found=number > 0)
    assert costs.kept_share == 0.8
    recovery = costs.expected_rebuild(10_000, "cpu")
    assert recovery == pytest.approx((0.2, 0.08))
    assert recovery.seconds == pytest.approx(0.28)
