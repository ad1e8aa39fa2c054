"""A workload that changes in mid-stream: TTLs follow it, and nothing older stays."""

from __future__ import annotations

import numpy as np
import pytest

from ttlcache import policies
from ttlcache.estimators.costs import CostModel
from ttlcache.estimators.gap_history import GapHistory
from ttlcache.policies.base import View
from ttlcache.types import GapKey, TurnFacts

BUILD = GapKey("bash", "make")
WINDOW = 200
#: Seconds to rebuild the context; with an unknown pool a held second costs one.
RECOVERY_S = 10.0
TURN = TurnFacts("p", 3, BUILD, context_tokens=1000, kv_blocks=50)


def ttl_s(policy: str, history: GapHistory) -> float:
    view = View(history, CostModel({"prefill": [0.0, 0.0, RECOVERY_S]}))
    return policies.create(policy).decide(TURN, view).ttl_s


@pytest.mark.parametrize("policy", ["cachettl", "adaptive"])
def test_ttls_follow_a_shift_in_mid_stream(policy: str) -> None:
    rng = np.random.default_rng(5)
    history = GapHistory(window=WINDOW)
    for gap_s in rng.uniform(0.5, 1.0, 5 * WINDOW).tolist():
        history.observe(BUILD, gap_s)
    before_s = ttl_s(policy, history)
    assert 0.9 < before_s <= 1.0  # nearly all return, and that is worth it

    for gap_s in rng.uniform(4.0, 5.0, WINDOW // 2).tolist():
        history.observe(BUILD, gap_s)
    assert ttl_s(policy, history) > 4.0  # a half of them already pays

    for gap_s in rng.uniform(60.0, 90.0, WINDOW).tolist():
        history.observe(BUILD, gap_s)
    assert ttl_s(policy, history) == 0.0  # no return is worth its wait any more

    for gap_s in rng.uniform(0.5, 1.0, WINDOW).tolist():
        history.observe(BUILD, gap_s)
    assert ttl_s(policy, history) == pytest.approx(before_s, abs=0.05)


@pytest.mark.parametrize("policy", ["cachettl", "adaptive"])
def test_what_left_the_window_leaves_no_trace(policy: str) -> None:
    rng = np.random.default_rng(6)
    recent = rng.exponential(3.0, WINDOW).tolist()
    shifted, fresh = GapHistory(window=WINDOW), GapHistory(window=WINDOW)
    for gap_s in rng.exponential(40.0, 3 * WINDOW).tolist():
        shifted.observe(BUILD, gap_s)
    ttl_s(policy, shifted)  # whatever is cached now must go as well
    for gap_s in recent:
        shifted.observe(BUILD, gap_s)
        fresh.observe(BUILD, gap_s)
    assert ttl_s(policy, shifted) == ttl_s(policy, fresh) > 0.0
