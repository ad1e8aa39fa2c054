"""Every published rule against an example worked out by hand."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ttlcache import policies
from ttlcache.estimators.costs import CostModel
from ttlcache.estimators.gap_history import GapHistory
from ttlcache.policies.base import View
from ttlcache.policies.cachettl import bounded
from ttlcache.types import (
    APPROVAL_GAP,
    FINAL_GAP,
    USER_GAP,
    GapKey,
    Pressure,
    TurnFacts,
)

LS = GapKey("bash", "ls")
GIT = GapKey("bash", "git")


def history_of(gaps):
    history = GapHistory()
    for key, gaps_s in gaps.items():
        for gap_s in gaps_s:
            history.observe(key, gap_s)
    return history


def view_of(history=None, wait_s=0.0, eta=1.0, avg_turns=0.0, pressure=None, tier=None):
    """One millisecond of prefill per token; a tier that gives back 10 a ms."""
    costs = CostModel(prefill=[1e-3, 0, 0], reload={"cpu": 1e-4})
    if wait_s:
        costs.observe_return_wait(wait_s)
    history = history if history is not None else GapHistory()
    pressure = pressure if pressure is not None else Pressure()
    return View(history, costs, eta, avg_turns, pressure, tier=tier)


def turn_of(key=LS, tokens=5000, waited_s=0.0):
    return TurnFacts("p", 3, key, tokens, tokens // 16, waited_s=waited_s)


def decide(name, turn, view, options=None):
    return policies.create(name, options or {}).decide(turn, view)


@pytest.mark.parametrize(
    ("name", "options", "waited_s", "tier", "ttl_s"),
    [
        ("none", {}, 0.0, None, 0.0),
        ("fixed", {}, 0.0, None, 2.0),
        ("fixed", {"ttl_s": 5}, 0.0, None, 5.0),
        ("fixed", {}, 1.5, None, 0.5),
        ("fixed", {}, 9.0, None, 0.0),
        ("fixed", {}, -9.0, None, 2.0),
        ("fixed", {"ttl_s": math.inf}, 9.0, None, math.inf),
        # 5,000 tokens: 5 s of prefill, or 0.5 s from the tier that has them.
        ("ski-rental", {}, 0.0, None, 5.0),
        ("ski-rental", {}, 0.0, "cpu", 0.5),
        ("ski-rental", {}, 3.0, None, 2.0),
    ],
)
def test_simple_rules_by_hand(name, options, waited_s, tier, ttl_s):
    decision = decide(name, turn_of(waited_s=waited_s), view_of(tier=tier), options)
    assert decision.ttl_s == pytest.approx(ttl_s)


@pytest.mark.parametrize(
    ("tokens", "wait_s", "eta", "ttl_s"),
    [
        # Gaps 1, 2, 4, 8. B = 5: 1.25-1, 2.5-2, 3.75-4, 5-8 -> best 0.5 at 2.
        (5_000, 0.0, 1.0, 2.0),
        # B = 4 * 0.5 + 5 = 7: 0.75, 1.5, 1.25, -1 -> 2.
        (5_000, 4.0, 0.5, 2.0),
        # B = 20: 4, 8, 11, 12 -> 8.
        (5_000, 15.0, 1.0, 8.0),
        # B = 4: 0, 0, -1, -4: a tie with 0, the smallest TTL wins.
        (4_000, 0.0, 1.0, 0.0),
        # B = 8: 1, 2, 2, 0: a tie between 2 and 4.
        (8_000, 0.0, 1.0, 2.0),
        # Anti-memoryful: B = 5 - 6 < 0.
        (5_000, 6.0, -1.0, 0.0),
        # Beyond all sense: bounded.
        (5_000, 1e308, -1.0, 0.0),
        (5_000, 1e308, 1.0, 8.0),
    ],
)
def test_cachettl_by_hand(tokens, wait_s, eta, ttl_s):
    view = view_of(history_of({LS: [1, 2, 4, 8]}), wait_s, eta)
    decision = decide("cachettl", turn_of(tokens=tokens), view, {"k": 3})
    assert (decision.ttl_s, decision.reason) == (ttl_s, "ecdf:tool")
    assert bounded(math.nan) == 0.0


@pytest.mark.parametrize(
    ("tokens", "wait_s", "eta", "k", "ttl_s", "reason"),
    [
        # |S| = 3 <= K: Exp(1) and eta = 1, so B = 4 + 5 = 9 and tau = ln 9.
        (5_000, 4.0, -1.0, 3, math.log(9), "default"),
        # B = 1: not above 1.
        (1_000, 0.0, 1.0, 3, 0.0, "default"),
        # |S| > K >= |S[f]|: all gaps 1, 1, 3 with B = 12: 8-1, 12-3 -> 3.
        (12_000, 0.0, 1.0, 2, 3.0, "ecdf:global"),
        # |S[f]| > K: 1, 1 -> 1.
        (12_000, 0.0, 1.0, 1, 1.0, "ecdf:tool"),
    ],
)
def test_cachettl_cold_start(tokens, wait_s, eta, k, ttl_s, reason):
    # 3 records in all, 2 of the tool.
    view = view_of(history_of({LS: [1, 1], GapKey("search"): [3]}), wait_s, eta)
    decision = decide("cachettl", turn_of(tokens=tokens), view, {"k": k})
    assert (decision.ttl_s, decision.reason) == (pytest.approx(ttl_s), reason)


def test_cachettl_is_cold_up_to_the_papers_k():
    exactly_k = view_of(history_of({LS: [1.0] * 100}))
    assert decide("cachettl", turn_of(), exactly_k).reason == "default"


def test_cachettl_backs_off_to_coarser_keys():
    history = history_of({GIT: [1.0], GapKey("bash", "make"): [9.0, 9.0]})
    decision = decide("cachettl", turn_of(GIT, 90_000), view_of(history), {"k": 1})
    assert (decision.ttl_s, decision.inputs["records"]) == (9.0, 3.0)  # bash


@pytest.mark.parametrize(("waited_s", "ttl_s"), [(0.0, 2.0), (0.5, 1.5), (2.5, 0.0)])
def test_cachettl_later_in_the_gap_keeps_its_plan(waited_s, ttl_s):
    view = view_of(history_of({LS: [1, 2, 4, 8]}))
    turn = turn_of(waited_s=waited_s)
    assert decide("cachettl", turn, view, {"k": 3}).ttl_s == ttl_s


@pytest.mark.parametrize("key", [USER_GAP, APPROVAL_GAP])
def test_cachettl_counts_chats_that_never_return(key):
    history = history_of({LS: [1.0] * 5, key: [2.0]})
    # Own history of 1 <= K: the cold start, here the tools' 1 s.
    cold = decide("cachettl", turn_of(key), view_of(history), {"k": 3})
    assert (cold.ttl_s, cold.reason) == (1.0, "ecdf:global")
    history.observe(key, 60.0, completed=False)
    history.observe(key, 60.0, completed=False)
    assert decide("cachettl", turn_of(key), view_of(history), {"k": 3}).ttl_s == 1.0
    history.observe(key, 60.0, completed=False)
    # One of four came back, after 2 s: 5 / 4 - 2 < 0.
    warm = decide("cachettl", turn_of(key), view_of(history), {"k": 3})
    assert (warm.ttl_s, warm.reason) == (0.0, "ecdf:human")
    # B = 12: 12 / 4 - 2 = 1 > 0.
    dear = decide("cachettl", turn_of(key, 12_000), view_of(history), {"k": 3})
    assert dear.ttl_s == 2.0


def test_cachettl_keeps_no_output_without_a_tool_call():
    history = history_of({LS: [1.0] * 5, FINAL_GAP: [2.0] * 5})
    assert decide("cachettl", turn_of(FINAL_GAP), view_of(history), {"k": 3}).ttl_s == 0
    assert decide("cachettl", turn_of(FINAL_GAP), view_of()).ttl_s == 0


def brute_force(gaps_s, benefit_s):
    """The paper's enumeration in exact arithmetic; the smallest TTL on ties."""
    benefit, n = Fraction(benefit_s), len(gaps_s)

    def worth(tau):
        share = Fraction(sum(g <= tau for g in gaps_s), n)
        return share * benefit - Fraction(tau)

    return max(sorted({0.0, *gaps_s}), key=worth)


@given(
    st.lists(st.integers(0, 400), min_size=1, max_size=60),
    st.integers(0, 4000),
    st.sampled_from([-1.0, -0.25, 0.0, 0.5, 1.0]),
)
@settings(max_examples=300)
def test_cachettl_equals_brute_force(eighths, wait_eighths, eta):
    gaps_s = [e / 8 for e in eighths]  # eighths are exact in binary
    view = view_of(history_of({LS: gaps_s}), wait_s=wait_eighths / 8, eta=eta)
    decision = decide("cachettl", turn_of(tokens=3000), view, {"k": 0})
    benefit_s = decision.inputs["benefit_s"]
    assert benefit_s == wait_eighths / 8 * eta + view.costs.recovery_s(3000)
    assert decision.ttl_s == brute_force(gaps_s, benefit_s)


@pytest.mark.parametrize("name", ["cachettl", "adaptive"])
def test_ttls_follow_a_shift_in_mid_stream(name):
    # With an unknown pool a held second costs one; a prefill takes ten.
    rng, history = np.random.default_rng(5), GapHistory(window=200)

    def ttl_s_after(number, low_s, high_s):
        for gap_s in rng.uniform(low_s, high_s, number).tolist():
            history.observe(LS, gap_s)
        return decide(name, turn_of(tokens=10_000), view_of(history)).ttl_s

    before_s = ttl_s_after(1000, 0.5, 1.0)
    assert 0.9 < before_s <= 1.0  # nearly all return, and that is worth it
    assert ttl_s_after(100, 4.0, 5.0) > 4.0  # a half of them already pays
    assert ttl_s_after(200, 60.0, 90.0) == 0.0  # no return is worth its wait
    after_s = ttl_s_after(200, 0.5, 1.0)
    assert after_s == pytest.approx(before_s, abs=0.05)
