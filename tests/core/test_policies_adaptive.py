"""The adaptive policy: each idea by hand (without it: `tests/bench/test_ablations`)."""

from __future__ import annotations

import math

import pytest

from ttlcache import policies
from ttlcache.estimators.costs import MIN_LOST, CostModel
from ttlcache.estimators.gap_history import GapHistory
from ttlcache.policies.adaptive import Adaptive
from ttlcache.policies.base import View
from ttlcache.types import USER_GAP, GapKey, Pressure, TurnFacts

LS = GapKey("bash", "ls")


def history_of(gaps_s: list[float], key: GapKey = LS) -> GapHistory:
    history = GapHistory()
    for gap_s in gaps_s:
        history.observe(key, gap_s)
    return history


def view_of(
    history: GapHistory,
    pressure: Pressure | None = None,
    now_s: float | None = None,
    wait_s: float = 0.0,
    eta: float = 1.0,
) -> View:
    """One millisecond of prefill per token, footprints of 50 blocks."""
    costs = CostModel({"prefill": [1e-3, 0, 0]})
    if wait_s:
        costs.observe_return_wait(wait_s)
    return View(
        history,
        costs,
        eta,
        pressure=pressure if pressure is not None else Pressure(),  # price 1
        now_s=now_s,
    )


def turn_of(benefit_s: float, key: GapKey = LS, **more: float) -> TurnFacts:
    return TurnFacts("p", 3, key, int(1000 * benefit_s), 50, **more)  # type: ignore[arg-type]


class Eager(Adaptive):
    """Trusts its history from the first gap on."""

    MIN_RECORDS = 0


policies.register("test-adaptive-eager", f"{__name__}:Eager")


def ttl_s(policy: Adaptive, turn: TurnFacts, view: View) -> float:
    return policy.decide(turn, view).ttl_s


def test_a_claimed_pin_stops_costing() -> None:
    # Gaps 1, 1, 1, 10 with B = 12. Charged by TTL: 9 - 1, 12 - 10 -> 1.
    # Charged by use: 9 - 1 = 8; 12 - (1 + 0.25 * 9) = 8.75 -> 10.
    view = view_of(history_of([1, 1, 1, 10]))
    assert ttl_s(Eager(), turn_of(12), view) == 10.0


def test_idle_memory_is_free_and_scarce_memory_is_dear() -> None:
    history, turn = history_of([10, 20, 40, 80]), turn_of(4)
    full = Pressure(pool_blocks=100)
    decision = Eager().decide(turn, view_of(history, full))
    assert (decision.ttl_s, decision.reason) == (math.inf, "memory-free")
    # Half the pool. One waits, none runs: B = 2 * 4 = 8, less half of 10, 17.5, 27.5,
    # 37.5: 2 - 5 < 0, 4 - 8.75 < 0, …
    one = view_of(history, Pressure(100, num_waiting=1))
    assert ttl_s(Eager(), turn, one) == 0.0
    # 7 run: a second of recovery delays 9, B = 36: 9 - 5, 18 - 8.75, 27 - 13.75,
    # 36 - 18.75 = 17.25.
    seven = view_of(history, Pressure(100, num_waiting=1, num_running=7))
    assert ttl_s(Eager(), turn, seven) == 80.0
    # 7 run, 7 wait: B = 15 / 7 * 4 = 8.57: 2.14 - 5 < 0.
    crowd = view_of(history, Pressure(100, num_waiting=7, num_running=7))
    assert ttl_s(Eager(), turn, crowd) == 0.0


def test_queueing_again_counts_in_the_paper_s_bargain_only() -> None:
    # B = 2 + 20 * 0.5 = 12 as in the first test; with a known pool 2 * 2 = 4.
    history = history_of([1, 1, 1, 10])
    flat = view_of(history, wait_s=20.0, eta=0.5)
    assert ttl_s(Eager(), turn_of(2), flat) == 10.0
    pressure = Pressure(pool_blocks=50, num_waiting=1)
    priced = view_of(history, pressure, wait_s=20.0, eta=0.5)
    decision = Eager().decide(turn_of(2), priced)
    assert (decision.ttl_s, decision.inputs["benefit_s"]) == (1.0, 4.0)


def test_a_stall_waits_for_the_rebuild_and_victims_are_whole() -> None:
    view = view_of(history_of([1.0] * 4), Pressure(100, num_waiting=1))
    decision = Eager().decide(turn_of(5), view)
    assert (decision.stall_wait_s, decision.min_keep_share) == (5.0, 0.8)


def test_what_a_tier_has_not_yet_may_lose_a_little() -> None:
    """To give it up as a whole would cost a copy of all of it."""
    view = view_of(history_of([1.0] * 4))._replace(tier="cpu", tier_has_copy=False)
    assert Eager().decide(turn_of(5), view).min_keep_share == 0.8


def test_with_a_tier_below_victims_are_whole() -> None:
    view = view_of(history_of([1.0] * 4), Pressure(100, num_waiting=1))
    policy = Eager()
    assert policy.decide(turn_of(5), view).min_keep_share == 0.8
    assert policy.decide(turn_of(5), view._replace(tier="cpu")).min_keep_share == 1.0


def test_a_second_of_reload_counts_as_one_of_prefill() -> None:
    """One waits, nine run: a second of either counts 11."""
    pressure = Pressure(100, num_waiting=1, num_running=9)
    costs = CostModel({"prefill": [1.0, 0.0, 0.0], "reload": {"cpu": [0.0, 0.1]}})
    view = view_of(history_of([1.0] * 4), pressure)._replace(costs=costs, tier="cpu")
    turn = turn_of(5)
    benefit_s = Eager().decide(turn, view).inputs["benefit_s"]
    assert benefit_s == pytest.approx(11 * 0.1 * turn.context_tokens)
    benefit_s = Eager().decide(turn, view._replace(tier=None)).inputs["benefit_s"]
    assert benefit_s == pytest.approx(11 * turn.context_tokens)


def test_a_tier_that_forgets_is_believed_as_far_as_it_keeps() -> None:
    """As above; of what was given up and wanted again the tier had 60 %."""
    pressure = Pressure(100, num_waiting=1, num_running=9)
    costs = CostModel({"prefill": [1.0, 0.0, 0.0], "reload": {"cpu": [0.0, 0.1]}})
    for number in range(MIN_LOST):
        costs.observe_lost(100, is_found=number < 3)
    view = view_of(history_of([1.0] * 4), pressure)._replace(costs=costs, tier="cpu")
    turn = turn_of(5)
    prefill_s, reload_s = 0.4 * turn.context_tokens, 0.06 * turn.context_tokens
    decision = Eager().decide(turn, view)
    assert decision.stall_wait_s == pytest.approx(prefill_s + reload_s)
    assert decision.inputs["benefit_s"] == pytest.approx(11 * (prefill_s + reload_s))


def test_gaps_that_never_ended_count() -> None:
    # 1, 1 came back, two were given up at 5. F(1) = 1/2: 0.75 - 1 < 0.
    history = history_of([1, 1])
    history.observe(LS, 5.0, completed=False)
    history.observe(LS, 5.0, completed=False)
    view = view_of(history)
    assert ttl_s(Eager(), turn_of(1.5), view) == 0.0


def test_open_gaps_count_when_the_time_is_known() -> None:
    history = history_of([1, 1])
    for token in ("a", "b"):
        history.start(token, LS, now_s=100.0)
    assert ttl_s(Eager(), turn_of(1.5), view_of(history)) == 1.0
    assert ttl_s(Eager(), turn_of(1.5), view_of(history, now_s=105.0)) == 0.0


def test_a_tool_that_never_returns_is_released() -> None:
    history = GapHistory()
    history.observe(LS, 5.0, completed=False)
    decision = Eager().decide(turn_of(9), view_of(history))
    assert (decision.ttl_s, decision.reason) == (0.0, "survival:key")


def test_the_client_s_estimate() -> None:
    view = view_of(history_of([1, 2, 4, 8]))
    # 3 s are worth B = 5: held 1.5 times as long.
    decision = Eager().decide(turn_of(5, tool_eta_s=3.0), view)
    assert (decision.ttl_s, decision.reason) == (4.5, "client-eta")
    # 6 s are not.
    assert ttl_s(Eager(), turn_of(5, tool_eta_s=6.0), view) == 0.0
    # 2 of 3 s are over.
    assert ttl_s(Eager(), turn_of(5, tool_eta_s=3.0, waited_s=2.0), view) == 1.5
    # Overrun or absurd: the history decides.
    for eta_s in (0.0, -1.0, math.nan):
        assert ttl_s(Eager(), turn_of(5, tool_eta_s=eta_s), view) == 8.0


def test_deciding_again_uses_what_the_wait_tells() -> None:
    # B = 5, gaps 1, 2, 10, 11: 1.25 - 1, 2.5 - 1.75, 3.75 - 5.75, 5 - 6 -> 2.
    view = view_of(history_of([1, 2, 10, 11]))
    assert ttl_s(Eager(), turn_of(5), view) == 2.0
    # After 9.5 s half a second or 1.5 s are left: 2.5 - 0.5, 5 - 1 -> 1.5 more.
    assert ttl_s(Eager(), turn_of(5, waited_s=9.5), view) == 1.5
    # Longer than any gap so far.
    assert ttl_s(Eager(), turn_of(5, waited_s=12.0), view) == 0.0


def test_the_papers_default_while_data_are_thin() -> None:
    view = view_of(GapHistory())
    cold = Eager().decide(turn_of(5), view)
    assert (cold.ttl_s, cold.reason) == (pytest.approx(math.log(5)), "default")
    waited = turn_of(5, waited_s=0.5)
    assert ttl_s(Eager(), waited, view) == pytest.approx(math.log(5) - 0.5)
    # A quarter of the pool, B = 2 * 5: worth holding for four times ten seconds.
    cheap = view_of(GapHistory(), Pressure(pool_blocks=200, num_waiting=1))
    assert ttl_s(Eager(), turn_of(5), cheap) == pytest.approx(math.log(40))


def test_people_never_borrow_the_tools_history() -> None:
    view = view_of(history_of([1.0] * 10))
    person = Eager().decide(turn_of(5, USER_GAP), view)
    assert (person.ttl_s, person.reason) == (pytest.approx(math.log(5)), "default")
    other = Eager().decide(turn_of(5, GapKey("search")), view)
    assert (other.ttl_s, other.reason) == (1.0, "survival:global")


def test_trust_counts_gaps_that_never_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    history = history_of([1, 1])
    history.observe(LS, 1.0, completed=False)
    view = view_of(history)
    monkeypatch.setattr(Eager, "MIN_RECORDS", 2)
    assert Eager().decide(turn_of(5), view).reason == "survival:key"
    monkeypatch.setattr(Eager, "MIN_RECORDS", 3)
    assert Eager().decide(turn_of(5), view).reason == "default"


def test_no_benefit_no_pin() -> None:
    view = view_of(history_of([1.0] * 4), wait_s=9.0, eta=-1.0)  # 5 - 9 < 0
    decision = Eager().decide(turn_of(5), view)
    assert (decision.ttl_s, decision.reason) == (0.0, "no-benefit")
