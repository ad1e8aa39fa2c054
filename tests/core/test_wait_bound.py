"""Above a tier that keeps what it gets, a request waits for twice the mean at most."""

import math

import pytest

from ttlcache.config import LAST_RESORT_S, load_config, max_wait_in_force
from ttlcache.estimators.costs import CostModel
from ttlcache.retention.tier_knowledge import TierKnowledge
from ttlcache.scheduling.wait_bound import LEAST_S, MIN_REQUESTS, WaitBound
from ttlcache.telemetry.events import Telemetry


@pytest.fixture
def tier():
    found = TierKnowledge("cpu", {}, CostModel(), Telemetry())
    found.on_reload_source("cpu")
    return found


def bound_after(tier, wait_s, requests=MIN_REQUESTS, fixed_s=None):
    bound = WaitBound(fixed_s, tier, range(9))
    for _ in range(requests):
        bound.on_allocated(wait_s)
    return bound


@pytest.mark.parametrize(
    ("wait_s", "bound_s"), [(3.0, 6.0), (0.01, LEAST_S), (1e6, LAST_RESORT_S)]
)
def test_it_is_twice_the_mean_wait_within_limits(tier, wait_s, bound_s):
    assert bound_after(tier, wait_s).seconds() == bound_s
    assert bound_after(tier, wait_s, MIN_REQUESTS - 1).seconds() == LAST_RESORT_S


@pytest.mark.parametrize(("newcomers", "bound_s"), [(3, 6.0), (4, LAST_RESORT_S)])
def test_it_is_not_for_newcomers_that_queue_up(tier, newcomers, bound_s):
    assert bound_after(tier, 3.0).seconds(newcomers) == bound_s


def test_without_a_tier_or_one_that_forgets_it_is_the_last_resort(tier):
    bound = bound_after(tier, 3.0)
    for number in range(100):
        tier.costs.observe_lost(100, is_found=number % 10 > 0)
    assert bound.seconds() == LAST_RESORT_S
    for _ in range(100):
        tier.costs.observe_lost(100, is_found=True)
    assert bound.seconds() == 6.0
    tier.on_reload_source(None)
    assert bound.seconds() == LAST_RESORT_S


def test_what_the_operator_set_stands(tier):
    assert bound_after(tier, 3.0, fixed_s=30.0).seconds() == 30.0
    assert bound_after(tier, 3.0).seconds(may_learn=lambda: False) == LAST_RESORT_S


@pytest.mark.parametrize(
    ("settings", "seconds"),
    [
        ({}, None),
        ({"lower_tier": "cpu"}, None),
        ({"max_queue_wait_s": 5.0}, 5.0),
        ({"policy": "cachettl", "lower_tier": "cpu"}, LAST_RESORT_S),
        ({"policy": "cachettl", "max_queue_wait_s": 5.0}, 5.0),
        ({"policy": "observe", "max_queue_wait_s": 5.0}, math.inf),
    ],
)
def test_only_adaptive_learns_it(settings, seconds):
    assert max_wait_in_force(load_config(settings)) == seconds
