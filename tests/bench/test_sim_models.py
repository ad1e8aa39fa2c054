"""Step times by hand, gap moments, workloads, links."""

import random
import statistics

import pytest

from ttlcache.estimators.costs import CostModel
from ttlcache.estimators.gap_history import GapHistory
from ttlcache.policies.base import View
from ttlcache.types import GapKey, TurnFacts
from ttlcache_sim.load.gap_mix import GapMix
from ttlcache_sim.load.programs import Moments
from ttlcache_sim.load.shapes import BFCL_TOOLS, SWE_TOOLS
from ttlcache_sim.steps.hardware import Hardware
from ttlcache_sim.steps.models import Model
from ttlcache_sim.steps.steptime import MBU, MFU, OVERHEAD_S, Roofline
from ttlcache_sim.tiers.link import use_tiers
from ttlcache_sim.tiers.offload import Offload
from ttlcache_sim.tiers.policy import TierAware, TierAwareOptions
from ttlcache_sim.tiers.store import (
    LINK_EFFICIENCY,
    LINK_LATENCY_S,
    Link,
    Tier,
    TierStore,
)

TOY_GPU = Hardware("toy", flops=1e12, hbm=1e11, link=1e9, ssd_read=2e8, ssd_write=1e8)
TOY = Model("toy", 1e9, layers=10, heads=8, kv_heads=2, head_dim=64, max_tokens=8192)
STEP = Roofline.of(TOY_GPU, TOY)


def test_a_decode_step_reads_weights_and_contexts():
    weights = 2e9
    kv = 2 * 2 * 64 * 2 * 10 * (1000 + 500)  # K and V, heads, dim, bytes, layers
    wanted = (weights + kv) / (1e11 * MBU) + OVERHEAD_S
    assert STEP.seconds([(1, 1000), (1, 500)]) == pytest.approx(wanted)


def test_a_prefill_step_is_bound_by_flops():
    matrices = 2 * 1e9 * 512
    attention = 4 * 10 * 8 * 64 * 512 * (2048 - 256)
    wanted = (matrices + attention) / (1e12 * MFU) + OVERHEAD_S
    assert STEP.seconds([(512, 2048)]) == pytest.approx(wanted)


def test_chunks_of_a_prompt_attend_to_what_came_before():
    chunks = STEP.seconds([(512, 512)]) + STEP.seconds([(488, 1000)])
    assert STEP.prefill_s(1000, 512) == pytest.approx(chunks)


@pytest.mark.parametrize(
    ("wanted", "tools", "name", "share"),
    [
        (Moments(0.925, 3.550), SWE_TOOLS, "cd", 0.941),
        (Moments(1.923, 2.133), BFCL_TOOLS, "fetch_url", 0.525),
    ],
)
def test_gaps_have_the_stated_moments_and_slowest_tenth(wanted, tools, name, share):
    mix = GapMix.fit(wanted, tools)
    assert mix.moments.mean == pytest.approx(wanted.mean)
    assert mix.moments.std == pytest.approx(wanted.std)
    rng = random.Random(2)
    drawn = [mix.draw(rng) for _ in range(150_000)]
    mean = statistics.fmean(seconds for _, seconds in drawn)
    assert mean == pytest.approx(wanted.mean, rel=0.05)
    own = sorted(seconds for tool, seconds in drawn if tool == name)
    slowest = own[int(0.9 * len(own)) :]
    assert sum(slowest) / sum(own) == pytest.approx(share, abs=0.02)


def test_a_link_serves_in_order():
    link = Link(100.0)
    assert link.book(50, ready_s=10.0) == (10.0, pytest.approx(10.5 + LINK_LATENCY_S))
    start_s, end_s = link.book(100, ready_s=10.1)
    assert start_s == pytest.approx(10.5 + LINK_LATENCY_S)
    assert end_s == pytest.approx(11.5 + 2 * LINK_LATENCY_S)


def test_a_tier_evicts_the_least_recently_used_tail_first():
    tier = Tier(100)
    tier.put("a", 60, now_s=0.0, arrives_s=0.0)
    tier.put("b", 30, now_s=0.0, arrives_s=0.0)
    tier.touch("a")
    tier.put("c", 30, now_s=0.0, arrives_s=0.0)
    assert [tier.tokens(name, 0.0) for name in "abc"] == [60, 10, 30]
    tier.put("d", 20, now_s=0.0, arrives_s=0.0)
    assert [tier.tokens(name, 0.0) for name in "abcd"] == [50, 0, 30, 20]


def test_what_is_on_its_way_cannot_be_read():
    tier = Tier(1000)
    tier.put("a", 100, now_s=0.0, arrives_s=5.0)
    assert tier.tokens("a", 4.9) == 0
    assert tier.expected("a") == 100
    assert tier.tokens("a", 5.0) == 100
    tier.put("a", 150, now_s=6.0, arrives_s=8.0)
    assert tier.tokens("a", 7.0) == 100
    assert tier.tokens("a", 8.0) == 150


def test_a_load_pays_for_the_slowest_link():
    store = TierStore(Offload(1000.0, 10_000.0), TOY_GPU, bytes_per_token=1.0)
    store.write("a", 800, now_s=0.0)
    store.write("b", 600, now_s=100.0)  # pushes half of "a" out of the CPU tier
    assert store.cpu.tokens("a", 200.0) == 400
    assert store.readable("a", 200.0) == 800
    cpu = store.load("b", 0, 600, now_s=200.0)
    rate = 1e9 * LINK_EFFICIENCY
    assert cpu.tier == "cpu"
    assert cpu.arrives_s - 200.0 == pytest.approx(LINK_LATENCY_S + 600 / rate)
    ssd = store.load("a", 0, 800, now_s=300.0)
    assert ssd.tier == "ssd"
    wanted = LINK_LATENCY_S + 400 / (2e8 * LINK_EFFICIENCY)
    assert ssd.arrives_s - 300.0 == pytest.approx(wanted)


def test_an_ended_program_leaves_every_tier():
    store = TierStore(Offload(1000.0, 1000.0), TOY_GPU, bytes_per_token=1.0)
    store.write("a", 500, now_s=0.0)
    assert store.holder("a") == "cpu"
    store.drop("a")
    assert store.holder("a") is None
    store.write("b", 1000, now_s=1.0)  # all is free again
    assert store.readable("b", 9.0) == 1000


def test_a_policy_above_simulated_tiers_knows_that_they_have_the_turn_already():
    store = TierStore(Offload(1e9), TOY_GPU, bytes_per_token=1.0)
    store.write("p", 1000, now_s=0.0)
    with use_tiers(store):
        policy = TierAware(TierAwareOptions(policy="adaptive"))
    view = View(GapHistory(), CostModel(), tier_has_copy=False)
    turn = TurnFacts("p", 1, GapKey("bash"), 1000, 10)
    assert policy.decide(turn, view).min_keep_share == 1.0
    elsewhere = TurnFacts("q", 1, GapKey("bash"), 1000, 10)
    assert policy.decide(elsewhere, view).min_keep_share < 1.0
