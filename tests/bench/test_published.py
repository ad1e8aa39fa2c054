"""TTL rules of other papers, each against an example worked out by hand."""

from __future__ import annotations

import math

import pytest

from bench.sim.rivals.published import POLICIES, empirical_bernstein
from tests.core.test_policies_paper import LS, decide, history_of, turn_of, view_of
from ttlcache import policies
from ttlcache.estimators.costs import CostModel
from ttlcache.estimators.gap_history import GapHistory
from ttlcache.policies.base import Policy, View
from ttlcache.testing.policy_contract import PolicyContract
from ttlcache.types import FINAL_GAP, USER_GAP, GapKey, Pressure

RIVALS = [(policy.name, {}) for policy in POLICIES]


@pytest.mark.parametrize("variant", [*RIVALS, ("infercept", {"swap_hidden": 1.0})])
class TestEveryPolicy(PolicyContract):
    @pytest.fixture(autouse=True)
    def _choose(self, variant) -> None:
        self.variant = variant

    def make_policy(self) -> Policy:
        return policies.create(*self.variant)


@pytest.mark.parametrize(
    ("gaps_s", "ttl_s", "reason"),
    [
        ([], 2.0, "unknown-tool"),
        ([1.0, 3.0], 2.0, "fast-tool"),  # mean 2.0 is not above 2.0
        ([1.0, 3.1], 0.0, "slow-tool"),
        ([0.1] * 9 + [30.0], 0.0, "slow-tool"),  # mean 3.09: one straggler
    ],
)
def test_continuum_public(gaps_s, ttl_s, reason):
    history = history_of({LS: gaps_s, GapKey("bash", "cd"): [50.0]})
    decision = decide("continuum-public", turn_of(), view_of(history))
    assert (decision.ttl_s, decision.reason) == (ttl_s, reason)


@pytest.mark.parametrize("key", [USER_GAP, FINAL_GAP])
def test_continuum_public_does_not_pin_without_a_tool(key):
    history = history_of({key: [0.1] * 10})
    decision = decide("continuum-public", turn_of(key), view_of(history))
    assert (decision.ttl_s, decision.reason) == (0.0, "no-tool")


V1 = {"delta": 0.05, "b_s": 6.0, "n_min": 2, "t_default_s": 2.0, "alpha": 0.1}


def v1_bound(mean: float, var: float, n: int) -> float:
    log_term = 4.0943446  # ln(3 / 0.05) = ln 60
    return mean + math.sqrt(2 * var * log_term / n) + 3 * 6.0 * log_term / n


def test_continuum_v1_starts_with_its_default():
    # No records: B = T_default = 2, so 2^2 / 2 * (1 + 0.1 * 10) = 4.
    decision = decide("continuum-v1", turn_of(), view_of(avg_turns=10.0), V1)
    assert decision.ttl_s == pytest.approx(4.0)
    assert decision.reason == "bernstein:default"
    one = history_of({LS: [1.0]})
    assert decide("continuum-v1", turn_of(), view_of(one), V1).ttl_s == 2.0


def test_continuum_v1_per_tool_and_global():
    # ls: 1, 3: mean 2, variance 2 (n - 1). All: 1, 3, 5: mean 3, variance 4.
    history = history_of({LS: [1.0, 3.0], GapKey("search"): [5.0]})
    view = view_of(history, avg_turns=10.0)
    of_tool = decide("continuum-v1", turn_of(), view, V1)
    assert of_tool.ttl_s == pytest.approx(4 / v1_bound(2, 2, 2) * 2)
    assert of_tool.reason == "bernstein:tool"
    of_all = decide("continuum-v1", turn_of(GapKey("search")), view, V1)
    assert of_all.ttl_s == pytest.approx(4 / v1_bound(3, 4, 3) * 2)
    assert of_all.reason == "bernstein:global"


def test_empirical_bernstein_by_hand():
    # delta = 3/e makes L = 1: 2 + sqrt(2*9/18) + 3*6/18 = 2 + 1 + 1.
    bound = empirical_bernstein(2.0, 3.0, 18, bound=6.0, delta=3 / math.e)
    assert bound == pytest.approx(4.0)


def test_infercept_by_hand():
    # C = 4,000 tokens in 250 blocks, 16 a block. 1,000 - 250 pinned - 250 its own:
    # 500 blocks, 8,000 tokens of others. Chunks of 2,000: n = 2, 2 s each.
    # discard = 4 * 4000 / 2 + 2 * 2 * 8000 = 40,000 -> 10 s of preserving
    pressure = Pressure(pool_blocks=1000, free_blocks=0, pinned_blocks=250)
    turn, options = turn_of(tokens=4000), {"chunk_tokens": 2000}
    costs = CostModel(prefill=[1e-3, 0, 0])
    alone = View(GapHistory(), costs, pressure=pressure)
    decision = decide("infercept", turn, alone, dict(options))
    assert decision.ttl_s == pytest.approx(10.0)
    assert decision.reason == "then:discard"
    # A tier: 0.4 s each way. swap = 2 * 0.4 * 8000 = 6,400 -> 1.6 s
    with_tier = view_of(pressure=pressure)
    decision = decide("infercept", turn, with_tier, dict(options))
    assert decision.ttl_s == pytest.approx(1.6)
    assert decision.reason == "then:swap"
    # Half of it hidden behind the batch.
    hidden = {**options, "swap_hidden": 0.5}
    assert decide("infercept", turn, with_tier, hidden).ttl_s == pytest.approx(0.8)
    # T_int is the time already waited: 0.6 s of it leave 1 s. Its blocks are pinned.
    later = turn_of(tokens=4000, waited_s=0.6)
    with_tier = view_of(pressure=pressure._replace(pinned_blocks=500))
    assert decide("infercept", later, with_tier, dict(options)).ttl_s == pytest.approx(
        1
    )
