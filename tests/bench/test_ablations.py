"""`adaptive` without one idea at a time: what each takes away, and nothing else."""

import inspect
import math

import pytest

from bench.sim.rivals.ablations import ABLATIONS
from bench.sim.rivals.arms import parse_arms
from bench.sim.rivals.oracle import OraclePolicy
from bench.sim.settings import Cell, EngineSetting
from tests.core.test_policies_adaptive import LS, history_of, turn_of, view_of
from ttlcache import policies
from ttlcache.config import admission_in_force, load_config, ordering_in_force
from ttlcache.estimators.costs import MIN_LOST, CostModel
from ttlcache.policies.adaptive import Adaptive
from ttlcache.types import Pressure
from ttlcache_sim.cell import engine_spec
from ttlcache_sim.load.workload import WorkloadSpec, build

FULL = Pressure(100, num_waiting=1, num_running=9)


@pytest.fixture(autouse=True)
def _trust_any_history(monkeypatch):
    monkeypatch.setattr(Adaptive, "MIN_RECORDS", 0)


def decide(name, turn, view):
    return ABLATIONS[name]().decide(turn, view)


@pytest.mark.parametrize("name", ABLATIONS)
def test_an_ablation_takes_away_one_method_or_attribute(name):
    own = set(vars(ABLATIONS[name])) & set(vars(Adaptive))
    assert len(own - {"__module__", "__doc__", "__abstractmethods__", "_abc_impl"}) == 1
    assert inspect.getdoc(ABLATIONS[name])
    assert type(policies.create(f"adaptive:{name}")) is ABLATIONS[name]


@pytest.mark.parametrize(
    ("name", "gaps_s", "turn", "pressure", "full_s", "ablated_s"),
    [
        ("charge-whole-ttl", [1, 1, 1, 10], turn_of(12), None, 10.0, 1.0),
        ("flat-price", [10, 20, 40, 80], turn_of(4), FULL, 80.0, 0.0),
        ("no-client-estimate", [1, 2, 4, 8], turn_of(5, tool_eta_s=6.0), None, 0, 8.0),
        ("no-history", [1.0] * 1000, turn_of(5), None, 1.0, math.log(5)),
    ],
)
def test_ttls_with_an_idea_and_without(name, gaps_s, turn, pressure, full_s, ablated_s):
    view = view_of(history_of(gaps_s), pressure)
    assert Adaptive().decide(turn, view).ttl_s == full_s
    assert decide(name, turn, view).ttl_s == pytest.approx(ablated_s)


def test_gaps_that_never_ended_do_not_count():
    history = history_of([1, 1])
    for _ in range(2):
        history.observe(LS, 5.0, completed=False)
    assert Adaptive().decide(turn_of(1.5), view_of(history)).ttl_s == 0.0
    assert decide("ended-gaps-only", turn_of(1.5), view_of(history)).ttl_s == 1.0


def test_what_is_asked_of_the_reclaimer():
    view = view_of(history_of([1.0] * 4), FULL)
    assert decide("no-stall-wait", turn_of(5), view).stall_wait_s == 0.0
    assert decide("no-whole-victims", turn_of(5), view).min_keep_share == 0.0
    free = view_of(history_of([1.0] * 4), Pressure(100))
    assert Adaptive().decide(turn_of(5), free).uncontended
    assert not decide("no-repricing", turn_of(5), free).uncontended


def test_a_tier_that_forgets_is_believed_to_keep_everything():
    costs = CostModel(prefill=[1.0, 0.0, 0.0], reload={"cpu": 0.1})
    for number in range(MIN_LOST):
        costs.observe_lost(100, is_found=number < 3)
    view = view_of(history_of([1.0] * 4), FULL)._replace(costs=costs, tier="cpu")
    turn = turn_of(5)
    reload_s = 0.1 * turn.context_tokens
    assert Adaptive().decide(turn, view).stall_wait_s > 4 * reload_s
    for policy in (ABLATIONS["tier-keeps-all"](), OraclePolicy()):
        assert policy.decide(turn, view).stall_wait_s == pytest.approx(reload_s)
    # Where a prefill is cheaper nothing is reloaded.
    slow = CostModel(prefill=[1e-3, 0.0, 0.0], reload={"cpu": 1.0})
    decision = decide("tier-keeps-all", turn, view._replace(costs=slow))
    assert decision.stall_wait_s == pytest.approx(5.0)


# --- as arms ---------------------------------------------------------------------


@pytest.mark.parametrize("above_tier", [False, True])
def test_an_ablated_arm_keeps_its_order_and_admission(above_tier):
    [arm, plain] = parse_arms("adaptive:no-repricing,adaptive")
    assert arm.name == "adaptive:no-repricing"
    ours = load_config(arm.engine_config(1.0, above_tier=above_tier))
    tier = "lmcache" if above_tier else "none"
    base = load_config({"policy": "adaptive", "lower_tier": tier})
    assert ours.policy == "adaptive:no-repricing"
    assert ours.ordering == ordering_in_force(base)
    assert ours.admission == admission_in_force(base)
    assert plain.ablation == ""


@pytest.mark.parametrize("offload", ["none", "cpu:4"])
def test_the_engine_of_an_ablated_arm_has_that_policy(offload):
    [arm] = parse_arms("adaptive:no-history")
    setting = EngineSetting(blocks=2_000, offload=offload)
    load = WorkloadSpec("swe", programs=2, rate=1.0, seed=0)
    cell = Cell(arm, setting, load)
    extra = engine_spec(cell, build(load)).extra_config
    named = extra["policy_options"] if offload != "none" else extra
    assert named["policy"] == "adaptive:no-history"
    assert load_config(extra)
