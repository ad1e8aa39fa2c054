"""The adaptive policy: each idea by hand (without it: `tests/bench/test_ablations`)."""

import math

import pytest

from ttlcache import policies
from ttlcache.estimators.costs import MIN_LOST, CostModel
from ttlcache.estimators.gap_history import GapHistory
from ttlcache.policies.adaptive import Adaptive
from ttlcache.policies.base import View
from ttlcache.types import USER_GAP, GapKey, Pressure, TurnFacts

LS = GapKey("bash", "ls")


def history_of(gaps_s, key=LS):
    history = GapHistory()
    for gap_s in gaps_s:
        history.observe(key, gap_s)
    return history


def view_of(history, pressure=None, now_s=None, wait_s=0.0, eta=1.0):
    """One millisecond of prefill per token; without a pool a held second costs 1."""
    costs = CostModel(prefill=[1e-3, 0, 0])
    if wait_s:
        costs.observe_return_wait(wait_s)
    pressure = pressure if pressure is not None else Pressure()
    return View(history, costs, eta, pressure=pressure, now_s=now_s)


def turn_of(benefit_s, key=LS, **more):
    """Of 50 blocks."""
    return TurnFacts("p", 3, key, int(1000 * benefit_s), 50, **more)


class Eager(Adaptive):
    """Trusts its history from the first gap on."""

    MIN_RECORDS = 0


policies.register("test-adaptive-eager", f"{__name__}:Eager")


def ttl_s(turn, view):
    return Eager().decide(turn, view).ttl_s


def crowd(num_waiting, num_running=0, pool_blocks=100):
    return {"pressure": Pressure(pool_blocks, 0, 0, num_running, num_waiting)}


KEY = "survival:key"
#: gaps, turn, what the view has, TTL, its reason
BY_HAND = [
    # A claimed pin stops costing. Gaps 1, 1, 1, 10 with B = 12. Charged by TTL: 9 - 1,
    # 12 - 10 -> 1. Charged by use: 9 - 1 = 8; 12 - (1 + 0.25 * 9) = 8.75 -> 10.
    ([1, 1, 1, 10], turn_of(12), {}, 10.0, KEY),
    # Queueing again counts in the paper's bargain only: B = 2 + 20 * 0.5 = 12; with a
    # known pool 2 * 2 = 4.
    ([1, 1, 1, 10], turn_of(2), {"wait_s": 20.0, "eta": 0.5}, 10.0, KEY),
    ([1, 1, 1, 10], turn_of(2), {"wait_s": 20.0, **crowd(1, 0, 50)}, 1.0, KEY),
    # Idle memory is free, and scarce memory is dear.
    ([10, 20, 40, 80], turn_of(4), crowd(0), math.inf, "memory-free"),
    # Half the pool. One waits, none runs: B = 2 * 4 = 8, less half of 10, 17.5, 27.5,
    # 37.5: 2 - 5 < 0, 4 - 8.75 < 0, …
    ([10, 20, 40, 80], turn_of(4), crowd(1), 0.0, KEY),
    # 7 run: a second of recovery delays 9, B = 36: 9 - 5, 18 - 8.75, 27 - 13.75,
    # 36 - 18.75 = 17.25.
    ([10, 20, 40, 80], turn_of(4), crowd(1, 7), 80.0, KEY),
    # 7 run, 7 wait: B = 15 / 7 * 4 = 8.57: 2.14 - 5 < 0.
    ([10, 20, 40, 80], turn_of(4), crowd(7, 7), 0.0, KEY),
    # The client's estimate. 3 s are worth B = 5: held 1.5 times as long; 6 s are not;
    # 2 of 3 s are over; overrun or absurd: the history decides.
    ([1, 2, 4, 8], turn_of(5, tool_eta_s=3.0), {}, 4.5, "client-eta"),
    ([1, 2, 4, 8], turn_of(5, tool_eta_s=6.0), {}, 0.0, "client-eta"),
    ([1, 2, 4, 8], turn_of(5, tool_eta_s=3.0, waited_s=2.0), {}, 1.5, "client-eta"),
    *(
        ([1, 2, 4, 8], turn_of(5, tool_eta_s=odd_s), {}, 8.0, KEY)
        for odd_s in (0.0, -1.0, math.nan)
    ),
    # Deciding again. B = 5: 1.25 - 1, 2.5 - 1.75, 3.75 - 5.75, 5 - 6 -> 2, of which
    # something is left or not.
    ([1, 2, 10, 11], turn_of(5), {}, 2.0, KEY),
    ([1, 2, 10, 11], turn_of(5, waited_s=1.5), {}, 0.5, KEY),
    ([1, 2, 10, 11], turn_of(5, waited_s=9.5), {}, 0.0, KEY),
    # The paper's default while data are thin. A quarter of the pool, B = 2 * 5: worth
    # holding for four times ten seconds.
    ([], turn_of(5), {}, math.log(5), "default"),
    ([], turn_of(5, waited_s=0.5), {}, math.log(5) - 0.5, "default"),
    ([], turn_of(5), crowd(1, 0, 200), math.log(40), "default"),
    # People never borrow the tools' history.
    ([1.0] * 10, turn_of(5, USER_GAP), {}, math.log(5), "default"),
    ([1.0] * 10, turn_of(5, GapKey("search")), {}, 1.0, "survival:global"),
    # 5 - 9 < 0
    ([1.0] * 4, turn_of(5), {"wait_s": 9.0, "eta": -1.0}, 0.0, "no-benefit"),
]


@pytest.mark.parametrize(("gaps_s", "turn", "view", "ttl_s", "reason"), BY_HAND)
def test_ttls_by_hand(gaps_s, turn, view, ttl_s, reason):
    decision = Eager().decide(turn, view_of(history_of(gaps_s), **view))
    assert decision.ttl_s == pytest.approx(ttl_s)
    assert decision.reason == reason
    assert decision.uncontended == (reason == "memory-free")


@pytest.mark.parametrize(
    ("tier", "share"),
    [
        ({}, 0.8),
        ({"tier": "cpu"}, 1.0),
        # To give up as a whole what the tier has not yet would cost a copy of it.
        ({"tier": "cpu", "tier_has_copy": False}, 0.8),
    ],
)
def test_a_stall_waits_for_the_rebuild_and_victims_are_whole(tier, share):
    view = view_of(history_of([1.0] * 4), Pressure(100, num_waiting=1))._replace(**tier)
    decision = Eager().decide(turn_of(5), view)
    assert (decision.stall_wait_s, decision.min_keep_share) == (5.0, share)


@pytest.mark.parametrize(
    ("tier", "num_found", "prefill", "reload"),
    [
        (None, 0, 1.0, 0.0),
        ("cpu", MIN_LOST, 0.0, 0.1),
        # A tier that forgets is believed as far as it keeps, here 60 %.
        ("cpu", 3, 0.4, 0.06),
    ],
)
def test_a_second_of_reload_counts_as_one_of_prefill(tier, num_found, prefill, reload):
    """One waits, nine run: a second of either counts 11."""
    pressure = Pressure(100, num_waiting=1, num_running=9)
    costs = CostModel(prefill=[1.0, 0.0, 0.0], reload={"cpu": 0.1})
    for number in range(MIN_LOST):
        costs.observe_lost(100, is_found=number < num_found)
    view = view_of(history_of([1.0] * 4), pressure)._replace(costs=costs, tier=tier)
    turn = turn_of(5)
    decision = Eager().decide(turn, view)
    rebuild_s = (prefill + reload) * turn.context_tokens
    assert decision.stall_wait_s == pytest.approx(rebuild_s)
    assert decision.inputs["benefit_s"] == pytest.approx(11 * rebuild_s)


def test_gaps_that_never_ended_count():
    # 1, 1 came back, two were given up at 5. F(1) = 1/2: 0.75 - 1 < 0.
    history = history_of([1, 1])
    history.observe(LS, 5.0, completed=False)
    history.observe(LS, 5.0, completed=False)
    assert ttl_s(turn_of(1.5), view_of(history)) == 0.0


def test_open_gaps_count_when_the_time_is_known():
    history = history_of([1, 1])
    for token in ("a", "b"):
        history.start(token, LS, now_s=100.0)
    assert ttl_s(turn_of(1.5), view_of(history)) == 1.0
    assert ttl_s(turn_of(1.5), view_of(history, now_s=105.0)) == 0.0


def test_a_tool_that_never_returns_is_released():
    history = GapHistory()
    history.observe(LS, 5.0, completed=False)
    decision = Eager().decide(turn_of(9), view_of(history))
    assert (decision.ttl_s, decision.reason) == (0.0, "survival:key")


@pytest.mark.parametrize(("least", "reason"), [(2, "survival:key"), (3, "default")])
def test_trust_counts_gaps_that_never_ended(monkeypatch, least, reason):
    history = history_of([1, 1])
    history.observe(LS, 1.0, completed=False)
    monkeypatch.setattr(Eager, "MIN_RECORDS", least)
    assert Eager().decide(turn_of(5), view_of(history)).reason == reason
