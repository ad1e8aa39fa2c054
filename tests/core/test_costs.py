"""Costs: curves, online fits, robustness, price of memory, profiles."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ttlcache.errors import ConfigError
from ttlcache.estimators.costs import (
    KEPT_WINDOW,
    MIN_LOST,
    CostModel,
)
from ttlcache.types import Pressure

PROFILE = {"prefill": [1e-4, 1e-9, 0.01], "reload": {"cpu": [0.002, 1e-6]}}


def curves(costs: CostModel) -> list[list[float]]:
    lengths = (1, 1_000, 50_000, 10**6)
    tiers = [[costs.reload_s(tier, n) for n in lengths] for tier in costs.tiers]
    return [[costs.prefill_s(n) for n in lengths], *tiers]


def test_prefill_by_hand() -> None:
    costs = CostModel(PROFILE)
    # 10,000 tokens: 1 + 0.1 + 0.01 s
    assert costs.prefill_s(10_000) == pytest.approx(1.11)
    # With 4,000 there: 6,000 * 1e-4 + (1e8 - 1.6e7) * 1e-9 + 0.01
    assert costs.prefill_s(10_000, 4_000) == pytest.approx(0.6 + 0.084 + 0.01)
    assert costs.prefill_s(4_000, 4_000) == 0.0
    assert costs.prefill_s(0) == costs.prefill_s(-5) == 0.0


def test_recovery_is_the_cheaper_way() -> None:
    costs = CostModel(PROFILE)
    assert costs.reload_s("cpu", 10_000) == pytest.approx(0.012)
    assert costs.recovery_s(10_000, "cpu") == pytest.approx(0.012)
    assert costs.recovery_s(10_000) == costs.prefill_s(10_000)
    assert costs.reload_s("disk", 10_000) == math.inf
    assert costs.recovery_s(10_000, "disk") == costs.prefill_s(10_000)
    slow = CostModel({"reload": {"disk": [60.0, 1.0]}})
    assert slow.recovery_s(10_000, "disk") == slow.prefill_s(10_000)


def true_prefill_s(prompt: int, cached: int) -> float:
    steps = -(-(prompt - cached) // 2048)
    pairs = prompt**2 - cached**2
    return 0.02 * steps + 3e-5 * (prompt - cached) + 4e-10 * pairs


def test_prefill_is_learned_from_a_wrong_seed() -> None:
    rng = np.random.default_rng(0)
    costs = CostModel({"prefill": [1e-3, 1e-8, 0.0]})
    for _ in range(600):
        cached = int(rng.integers(0, 50_000))
        prompt = cached + int(rng.integers(200, 20_000))
        noise = 1.0 + 0.05 * rng.standard_normal()
        costs.observe_prefill(prompt, cached, true_prefill_s(prompt, cached) * noise)
    for prompt, cached in ((2_000, 0), (20_000, 0), (60_000, 50_000), (60_000, 0)):
        # The curve does not know how full the last step is.
        assert costs.prefill_s(prompt, cached) == pytest.approx(
            true_prefill_s(prompt, cached), rel=0.15
        )


def test_lengths_never_seen_follow_the_seed_s_shape() -> None:
    costs = CostModel({"prefill": [1e-4, 0.0, 0.0]})
    for _ in range(200):
        costs.observe_prefill(2_000, 0, 0.02)  # ten times faster than the seed
    assert costs.prefill_s(2_000) == pytest.approx(0.02, rel=0.02)
    assert costs.prefill_s(64_000) == pytest.approx(0.64, rel=0.1)


def test_stalls_do_not_bend_the_curve() -> None:
    rng = np.random.default_rng(1)
    costs = CostModel()
    for number in range(500):
        prompt = int(rng.integers(500, 30_000))
        stall_s = 30.0 if number % 20 == 5 else 0.0
        costs.observe_prefill(prompt, 0, true_prefill_s(prompt, 0) + stall_s)
    # One in twenty is 30 s late; unclipped, 10,000 tokens would read 1.9 s.
    assert costs.prefill_s(10_000) == pytest.approx(true_prefill_s(10_000, 0), rel=0.25)


def test_a_lasting_change_gets_through() -> None:
    rng = np.random.default_rng(2)
    costs = CostModel()
    for factor in (1.0, 5.0):
        for _ in range(1500):
            prompt = int(rng.integers(500, 30_000))
            costs.observe_prefill(prompt, 0, factor * true_prefill_s(prompt, 0))
    assert costs.prefill_s(10_000) == pytest.approx(
        5 * true_prefill_s(10_000, 0), rel=0.15
    )


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_nonsense_measurements_are_ignored(seconds: float) -> None:
    costs = CostModel(PROFILE)
    before = curves(costs)
    costs.observe_prefill(1000, 0, seconds)
    costs.observe_reload("cpu", 1000, seconds)
    costs.observe_reload("disk", 1000, seconds)
    assert curves(costs) == before


def test_impossible_token_counts_are_ignored() -> None:
    costs = CostModel(PROFILE)
    before = curves(costs)
    for prompt, cached in ((0, 0), (-5, 0), (10, 10), (10, 20), (10, -1)):
        costs.observe_prefill(prompt, cached, 1.0)
    costs.observe_reload("cpu", 0, 1.0)
    assert curves(costs) == before


@given(
    st.lists(
        st.tuples(st.integers(1, 10**7), st.integers(0, 10**7), st.floats(1e-9, 1e6)),
        max_size=60,
    )
)
@settings(max_examples=200, deadline=None)
def test_curves_stay_non_negative_and_rise(rows: list[tuple[int, int, float]]) -> None:
    costs = CostModel()
    for new, cached, seconds in rows:
        costs.observe_prefill(cached + new, cached, seconds)
        costs.observe_reload("cpu", new, seconds)
    for curve in curves(costs):
        assert 0.0 <= curve[0] <= curve[-1]
        assert curve == sorted(curve)


def test_reload_is_learned_per_tier() -> None:
    rng = np.random.default_rng(4)
    costs = CostModel()
    assert costs.tiers == ()
    costs.observe_reload("cpu", 10_000, 0.02)
    assert costs.reload_s("cpu", 10_000) == pytest.approx(0.02)
    for _ in range(300):
        tokens = int(rng.integers(500, 50_000))
        costs.observe_reload("cpu", tokens, 0.005 + 1e-6 * tokens)
        costs.observe_reload("disk", tokens, 0.05 + 2e-5 * tokens)
    assert costs.tiers == ("cpu", "disk")
    for tokens in (1_000, 30_000):
        assert costs.reload_s("cpu", tokens) == pytest.approx(
            0.005 + 1e-6 * tokens, rel=0.1
        )
        assert costs.reload_s("disk", tokens) == pytest.approx(
            0.05 + 2e-5 * tokens, rel=0.1
        )


def test_the_queueing_delay_is_a_sliding_mean() -> None:
    costs = CostModel()
    assert costs.queueing_delay_s == 0.0
    for wait_s in (1.0, 3.0, -1.0, math.nan, math.inf):
        costs.observe_return_wait(wait_s)
    assert costs.queueing_delay_s == 2.0
    for _ in range(1000):
        costs.observe_return_wait(0.0)
    assert costs.queueing_delay_s == 0.0


def priced(free: int, waiting: int, running: int = 4, lacking: int = 0) -> tuple:
    """Price and weight for 50 of 1,000 blocks."""
    pressure = Pressure(
        1000,
        free,
        num_waiting=waiting,
        num_running=running,
        wanted_blocks=lacking,
    )
    price = CostModel().memory_price(pressure, 50)
    assert price is not None
    return price.per_s, price.weight


def test_memory_price_by_hand() -> None:
    # 50 of 1,000 blocks delay each who waits by a twentieth of a second a second;
    # a second of recovery delays 10 who wait, 4 who run and itself: 15 / 10.
    assert priced(free=0, waiting=10) == (0.05, 1.5)
    assert priced(free=0, waiting=1) == (0.05, 6.0)
    assert priced(free=0, waiting=10, running=0) == (0.05, 1.1)
    # Nobody waits, however full the pool is.
    assert priced(free=0, waiting=0)[0] == 0.0
    # They wait for a batch slot, not for memory; or the head does lack some.
    assert priced(free=500, waiting=10)[0] == 0.0
    assert priced(free=500, waiting=10, lacking=600) == (0.05, 1.5)
    assert priced(free=100, waiting=10)[0] == 0.05  # the last tenth is in use


def test_memory_price_without_knowledge() -> None:
    assert CostModel().memory_price(Pressure(), 50) is None
    full = Pressure(10, num_waiting=1)
    assert CostModel().memory_price(full, 50).per_s == 1.0  # never beyond the pool


@pytest.mark.parametrize(
    ("profile", "words"),
    [
        ({"prefil": [1, 2, 3]}, ["'prefil'", "'prefill'"]),
        ({"prefill": [1e-4, 0]}, ["profile.prefill", "[0.0001, 0]", "3 numbers"]),
        ({"prefill": [0, 0, 0]}, ["profile.prefill", "not all 0"]),
        ({"prefill": [1e-4, -1, 0]}, ["profile.prefill", "-1"]),
        ({"prefill": [1e-4, math.nan, 0]}, ["profile.prefill", "nan"]),
        ({"prefill": [1e-4, math.inf, 0]}, ["profile.prefill", "inf"]),
        ({"prefill": [1e-4, True, 0]}, ["profile.prefill", "True"]),
        ({"prefill": "abc"}, ["profile.prefill", "'abc'"]),
        ({"prefill": None}, ["profile.prefill", "None"]),
        ({"reload": [1, 2]}, ["profile.reload", "[1, 2]", "mapping"]),
        ({"reload": {"cpu": [1]}}, ["profile.reload.cpu", "[1]", "2 numbers"]),
        ({"reload": {"cpu": 7}}, ["profile.reload.cpu", "7"]),
    ],
)
def test_wrong_profiles_name_key_value_and_expectation(
    profile: dict[str, object], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        CostModel(profile)
    for word in words:
        assert word in str(caught.value)


# --- what a lower tier keeps ---------------------------------------------------------


def test_a_tier_is_believed_until_returns_say_otherwise() -> None:
    costs = CostModel(PROFILE)
    for _ in range(MIN_LOST - 1):
        costs.observe_lost(1000, is_found=False)
        assert costs.kept_share == 1.0
    costs.observe_lost(0, is_found=False)  # nothing was lost
    assert costs.kept_share == 1.0
    costs.observe_lost(1000, is_found=False)
    assert costs.kept_share == 0.0


def test_the_share_is_of_tokens_of_recent_returns() -> None:
    costs = CostModel(PROFILE)
    for _ in range(MIN_LOST):
        costs.observe_lost(5000, is_found=True)
    for _ in range(KEPT_WINDOW - 2):
        costs.observe_lost(1000, is_found=False)
    costs.observe_lost(3000, is_found=True)
    # One of the first is left in the window.
    expected = (5000 + 3000) / (5000 + 3000 + (KEPT_WINDOW - 2) * 1000)
    assert costs.kept_share == pytest.approx(expected)


def test_recovery_is_a_reload_as_often_as_the_tier_keeps_what_it_got() -> None:
    costs = CostModel({"prefill": [1e-4, 0.0, 0.0], "reload": {"cpu": [0.0, 1e-5]}})
    # 10,000 tokens: one second of prefill, a tenth of a second of reload.
    assert costs.expected_rebuild(10_000, None) == pytest.approx((1.0, 0.0))
    assert costs.expected_rebuild(10_000, "disk") == pytest.approx((1.0, 0.0))
    assert costs.expected_rebuild(10_000, "cpu") == pytest.approx((0.0, 0.1))
    for number in range(MIN_LOST):
        costs.observe_lost(1000, is_found=number > 0)
    assert costs.kept_share == 0.8
    recovery = costs.expected_rebuild(10_000, "cpu")
    assert recovery == pytest.approx((0.2, 0.08))
    assert recovery.seconds == pytest.approx(0.28)


def test_a_slow_tier_is_no_way_back() -> None:
    costs = CostModel({"prefill": [1e-4, 0.0, 0.0], "reload": {"cpu": [0.0, 1.0]}})
    assert costs.expected_rebuild(10_000, "cpu") == pytest.approx((1.0, 0.0))
