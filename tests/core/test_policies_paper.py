"""Every published rule against an example worked out by hand."""

from __future__ import annotations

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
    Decision,
    GapKey,
    Pressure,
    TurnFacts,
)

LS = GapKey("bash", "ls")
GIT = GapKey("bash", "git")


def history_of(gaps: dict[GapKey, list[float]]) -> GapHistory:
    history = GapHistory()
    for key, gaps_s in gaps.items():
        for gap_s in gaps_s:
            history.observe(key, gap_s)
    return history


def view_of(
    history: GapHistory | None = None,
    wait_s: float = 0.0,
    eta: float = 1.0,
    avg_turns: float = 0.0,
    pressure: Pressure | None = None,
    tier: str | None = None,
) -> View:
    """One millisecond of prefill per token; a tier that gives back 10 a ms."""
    costs = CostModel({"prefill": [1e-3, 0, 0], "reload": {"cpu": [0, 1e-4]}})
    if wait_s:
        costs.observe_return_wait(wait_s)
    return View(
        history if history is not None else GapHistory(),
        costs,
        eta,
        avg_turns,
        pressure if pressure is not None else Pressure(),
        tier=tier,
    )


def turn_of(key: GapKey = LS, tokens: int = 5000, waited_s: float = 0.0) -> TurnFacts:
    return TurnFacts("p", 3, key, tokens, tokens // 16, waited_s=waited_s)


def decide(
    name: str, turn: TurnFacts, view: View, options: dict[str, object] | None = None
) -> Decision:
    return policies.create(name, options or {}).decide(turn, view)


def test_none_never_holds() -> None:
    assert decide("none", turn_of(), view_of()).ttl_s == 0.0


def test_fixed_holds_for_its_constant() -> None:
    assert decide("fixed", turn_of(), view_of()).ttl_s == 2.0
    assert decide("fixed", turn_of(), view_of(), {"ttl_s": 5}).ttl_s == 5.0
    assert decide("fixed", turn_of(waited_s=1.5), view_of()).ttl_s == 0.5
    assert decide("fixed", turn_of(waited_s=9.0), view_of()).ttl_s == 0.0
    assert decide("fixed", turn_of(waited_s=-9.0), view_of()).ttl_s == 2.0
    forever = {"ttl_s": math.inf}
    assert decide("fixed", turn_of(waited_s=9.0), view_of(), forever).ttl_s == math.inf


def test_ski_rental_holds_as_long_as_recovery_takes() -> None:
    # 5,000 tokens: 5 s of prefill, or 0.5 s from the tier that has them.
    assert decide("ski-rental", turn_of(), view_of()).ttl_s == pytest.approx(5.0)
    in_tier = view_of(tier="cpu")
    assert decide("ski-rental", turn_of(), in_tier).ttl_s == pytest.approx(0.5)
    half_way = turn_of(waited_s=3.0)
    assert decide("ski-rental", half_way, view_of()).ttl_s == pytest.approx(2.0)


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
    ],
)
def test_cachettl_by_hand(tokens: int, wait_s: float, eta: float, ttl_s: float) -> None:
    view = view_of(history_of({LS: [1, 2, 4, 8]}), wait_s, eta)
    decision = decide("cachettl", turn_of(tokens=tokens), view, {"k": 3})
    assert (decision.ttl_s, decision.reason) == (ttl_s, "ecdf:tool")


def test_cachettl_cold_start() -> None:
    # 3 records in all, 2 of the tool.
    history = history_of({LS: [1, 1], GapKey("search"): [3]})
    # |S| = 3 <= K: Exp(1) and eta = 1, so B = 4 + 5 = 9 and tau = ln 9.
    default = decide("cachettl", turn_of(), view_of(history, 4.0, eta=-1.0), {"k": 3})
    assert default.ttl_s == pytest.approx(math.log(9))
    assert default.reason == "default"
    # B = 1: not above 1.
    tiny = turn_of(tokens=1000)
    assert decide("cachettl", tiny, view_of(history), {"k": 3}).ttl_s == 0.0
    # |S| > K >= |S[f]|: all gaps 1, 1, 3 with B = 12: 8-1, 12-3 -> 3.
    wide = decide("cachettl", turn_of(tokens=12_000), view_of(history), {"k": 2})
    assert (wide.ttl_s, wide.reason) == (3.0, "ecdf:global")
    # |S[f]| > K: 1, 1 -> 1.
    own = decide("cachettl", turn_of(tokens=12_000), view_of(history), {"k": 1})
    assert (own.ttl_s, own.reason) == (1.0, "ecdf:tool")
    # K itself is not enough; the paper's K is 100.
    exactly_k = view_of(history_of({LS: [1.0] * 100}))
    assert decide("cachettl", turn_of(), exactly_k).reason == "default"


def test_cachettl_backs_off_to_coarser_keys() -> None:
    history = history_of({GIT: [1.0], GapKey("bash", "make"): [9.0, 9.0]})
    decision = decide("cachettl", turn_of(GIT, 90_000), view_of(history), {"k": 1})
    assert (decision.ttl_s, decision.inputs["records"]) == (9.0, 3.0)  # bash


def test_cachettl_later_in_the_gap_keeps_its_plan() -> None:
    view = view_of(history_of({LS: [1, 2, 4, 8]}))
    assert decide("cachettl", turn_of(), view, {"k": 3}).ttl_s == 2.0
    assert decide("cachettl", turn_of(waited_s=0.5), view, {"k": 3}).ttl_s == 1.5
    assert decide("cachettl", turn_of(waited_s=2.5), view, {"k": 3}).ttl_s == 0.0


@pytest.mark.parametrize("key", [USER_GAP, FINAL_GAP, APPROVAL_GAP])
def test_cachettl_counts_chats_that_never_return(key: GapKey) -> None:
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


def brute_force(gaps_s: list[float], benefit_s: float) -> float:
    """The paper's enumeration in exact arithmetic; the smallest TTL on ties."""
    benefit, n = Fraction(benefit_s), len(gaps_s)

    def worth(tau: float) -> Fraction:
        share = Fraction(sum(g <= tau for g in gaps_s), n)
        return share * benefit - Fraction(tau)

    return max(sorted({0.0, *gaps_s}), key=worth)


@given(
    st.lists(st.integers(0, 400), min_size=1, max_size=60),
    st.integers(0, 4000),
    st.sampled_from([-1.0, -0.25, 0.0, 0.5, 1.0]),
)
@settings(max_examples=1000, deadline=None)
def test_cachettl_equals_brute_force(
    eighths: list[int], wait_eighths: int, eta: float
) -> None:
    gaps_s = [e / 8 for e in eighths]  # eighths are exact in binary
    view = view_of(history_of({LS: gaps_s}), wait_s=wait_eighths / 8, eta=eta)
    decision = decide("cachettl", turn_of(tokens=3000), view, {"k": 0})
    benefit_s = decision.inputs["benefit_s"]
    assert benefit_s == wait_eighths / 8 * eta + view.costs.recovery_s(3000)
    assert decision.ttl_s == brute_force(gaps_s, benefit_s)


def test_cachettl_equals_brute_force_on_any_floats() -> None:
    rng = np.random.default_rng(11)
    for _ in range(200):
        gaps_s = rng.lognormal(0.0, 2.0, int(rng.integers(1, 80))).tolist()
        tokens = int(rng.integers(1, 60_000))
        decision = decide(
            "cachettl",
            turn_of(tokens=tokens),
            view_of(history_of({LS: gaps_s})),
            {"k": 0},
        )
        assert decision.ttl_s == brute_force(gaps_s, decision.inputs["benefit_s"])


def test_benefits_beyond_all_sense_are_bounded() -> None:
    history = history_of({LS: [1, 2, 4, 8]})
    view = view_of(history, wait_s=1e308, eta=-1.0)
    assert decide("cachettl", turn_of(), view, {"k": 3}).ttl_s == 0.0
    view = view_of(history, wait_s=1e308)
    assert decide("cachettl", turn_of(), view, {"k": 3}).ttl_s == 8.0
    assert bounded(math.nan) == 0.0
