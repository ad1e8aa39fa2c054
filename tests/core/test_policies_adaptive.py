"""The adaptive policy: each idea by hand, switched on and off."""

from __future__ import annotations

import math

import pytest

from ttlcache.estimators.costs import MIN_LOST, CostModel
from ttlcache.estimators.gap_history import GapHistory
from ttlcache.policies.adaptive import Adaptive
from ttlcache.policies.base import View
from ttlcache.types import USER_GAP, Decision, GapKey, Pressure, TurnFacts

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
    costs.observe_footprint(50)
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


def adaptive(**options: object) -> Adaptive:
    return Adaptive.from_options({"min_records": 0, **options})


def ttl_s(policy: Adaptive, turn: TurnFacts, view: View) -> float:
    return policy.decide(turn, view).ttl_s


def test_a_claimed_pin_stops_costing() -> None:
    # Gaps 1, 1, 1, 10 with B = 12. Charged by TTL: 9 - 1, 12 - 10 -> 1.
    # Charged by use: 9 - 1 = 8; 12 - (1 + 0.25 * 9) = 8.75 -> 10.
    view = view_of(history_of([1, 1, 1, 10]))
    assert ttl_s(adaptive(), turn_of(12), view) == 10.0
    assert ttl_s(adaptive(charge_what_is_used=False), turn_of(12), view) == 1.0


def test_idle_memory_is_free_and_scarce_memory_is_dear() -> None:
    history, turn = history_of([10, 20, 40, 80]), turn_of(4)
    full = Pressure(pool_blocks=100)
    decision = adaptive().decide(turn, view_of(history, full))
    assert (decision.ttl_s, decision.reason) == (math.inf, "memory-free")
    # Half the pool. One waits, none runs: B = 2 * 4 = 8, less half of 10, 17.5, 27.5,
    # 37.5: 2 - 5 < 0, 4 - 8.75 < 0, …
    one = view_of(history, Pressure(100, num_waiting=1))
    assert ttl_s(adaptive(), turn, one) == 0.0
    # 7 run: a second of recovery delays 9, B = 36: 9 - 5, 18 - 8.75, 27 - 13.75,
    # 36 - 18.75 = 17.25.
    seven = view_of(history, Pressure(100, num_waiting=1, num_running=7))
    assert ttl_s(adaptive(), turn, seven) == 80.0
    # 7 run, 7 wait: B = 15 / 7 * 4 = 8.57: 2.14 - 5 < 0.
    crowd = view_of(history, Pressure(100, num_waiting=7, num_running=7))
    assert ttl_s(adaptive(), turn, crowd) == 0.0
    # Priced flat it is the paper's bargain, whatever the queue: 4 - 10 < 0.
    assert ttl_s(adaptive(price_memory=False), turn, seven) == 0.0


def test_queueing_again_counts_in_the_paper_s_bargain_only() -> None:
    # B = 2 + 20 * 0.5 = 12 as in the first test; with a known pool 2 * 2 = 4.
    history = history_of([1, 1, 1, 10])
    flat = view_of(history, wait_s=20.0, eta=0.5)
    assert ttl_s(adaptive(), turn_of(2), flat) == 10.0
    pressure = Pressure(pool_blocks=50, num_waiting=1)
    priced = view_of(history, pressure, wait_s=20.0, eta=0.5)
    decision = adaptive().decide(turn_of(2), priced)
    assert (decision.ttl_s, decision.inputs["benefit_s"]) == (1.0, 4.0)


def test_patience_is_the_recovery_and_victims_are_whole() -> None:
    view = view_of(history_of([1.0] * 4), Pressure(100, num_waiting=1))
    decision = adaptive().decide(turn_of(5), view)
    assert (decision.stall_wait_s, decision.min_keep_share) == (5.0, 0.8)
    other = adaptive(patient_stalls=False, whole_victims=False).decide(turn_of(5), view)
    assert (other.stall_wait_s, other.min_keep_share) == (0.0, 0.0)


def test_what_a_tier_has_not_yet_may_lose_a_little() -> None:
    """To give it up as a whole would cost a copy of all of it."""
    view = view_of(history_of([1.0] * 4))._replace(tier="cpu", tier_has_copy=False)
    assert adaptive().decide(turn_of(5), view).min_keep_share == 0.8


def test_with_a_tier_below_victims_are_whole() -> None:
    view = view_of(history_of([1.0] * 4), Pressure(100, num_waiting=1))
    policy = adaptive()
    assert policy.decide(turn_of(5), view).min_keep_share == 0.8
    assert policy.decide(turn_of(5), view._replace(tier="cpu")).min_keep_share == 1.0


def test_a_reload_beside_others_is_worth_less_memory() -> None:
    """One waits, nine run: a second of recovery counts 11, or 1 and the memory."""
    pressure = Pressure(100, num_waiting=1, num_running=9)
    costs = CostModel({"prefill": [1.0, 0.0, 0.0], "reload": {"cpu": [0.0, 0.1]}})
    view = view_of(history_of([1.0] * 4), pressure)._replace(costs=costs, tier="cpu")
    turn = turn_of(5)

    def benefit_s(**options) -> float:
        return adaptive(**options).decide(turn, view).inputs["benefit_s"]

    reload_s = 0.1 * turn.context_tokens
    share = turn.kv_blocks / 100
    assert benefit_s() == pytest.approx((1 + share) * reload_s)
    assert benefit_s(lone_reloads=False) == pytest.approx(11 * reload_s)
    view = view._replace(tier_has_copy=False)
    assert benefit_s() == pytest.approx(11 * reload_s), "a copy down comes first"
    view = view._replace(tier=None)
    prefill_s = float(turn.context_tokens)
    assert benefit_s() == pytest.approx(11 * prefill_s)


def test_a_tier_that_forgets_is_believed_as_far_as_it_keeps() -> None:
    """As above; of what was given up and wanted again the tier had 60 %."""
    pressure = Pressure(100, num_waiting=1, num_running=9)
    costs = CostModel({"prefill": [1.0, 0.0, 0.0], "reload": {"cpu": [0.0, 0.1]}})
    for number in range(MIN_LOST):
        costs.observe_lost(100, found_below=number < 3)
    view = view_of(history_of([1.0] * 4), pressure)._replace(costs=costs, tier="cpu")
    turn = turn_of(5)
    prefill_s, reload_s = 0.4 * turn.context_tokens, 0.06 * turn.context_tokens
    decision = adaptive().decide(turn, view)
    assert decision.stall_wait_s == pytest.approx(prefill_s + reload_s)
    expected_s = 11 * prefill_s + (1 + turn.kv_blocks / 100) * reload_s
    assert decision.inputs["benefit_s"] == pytest.approx(expected_s)
    believing = adaptive(kept_share=False).decide(turn, view)
    assert believing.stall_wait_s == pytest.approx(reload_s / 0.6)


def test_gaps_that_never_ended_count() -> None:
    # 1, 1 came back, two were given up at 5. F(1) = 1/2: 0.75 - 1 < 0.
    history = history_of([1, 1])
    history.censor(LS, 5.0)
    history.censor(LS, 5.0)
    view = view_of(history)
    assert ttl_s(adaptive(), turn_of(1.5), view) == 0.0
    assert ttl_s(adaptive(censored=False), turn_of(1.5), view) == 1.0


def test_open_gaps_count_when_the_time_is_known() -> None:
    history = history_of([1, 1])
    for token in ("a", "b"):
        history.start(token, LS, now_s=100.0)
    assert ttl_s(adaptive(), turn_of(1.5), view_of(history)) == 1.0
    assert ttl_s(adaptive(), turn_of(1.5), view_of(history, now_s=105.0)) == 0.0


def test_a_tool_that_never_returns_is_released() -> None:
    history = GapHistory()
    history.censor(LS, 5.0)
    decision = adaptive().decide(turn_of(9), view_of(history))
    assert (decision.ttl_s, decision.reason) == (0.0, "survival:key")


def test_the_client_s_estimate() -> None:
    view = view_of(history_of([1, 2, 4, 8]))
    # 3 s are worth B = 5: held 1.5 times as long.
    decision = adaptive().decide(turn_of(5, tool_eta_s=3.0), view)
    assert (decision.ttl_s, decision.reason) == (4.5, "client-eta")
    # 6 s are not.
    assert ttl_s(adaptive(), turn_of(5, tool_eta_s=6.0), view) == 0.0
    # 2 of 3 s are over.
    assert ttl_s(adaptive(), turn_of(5, tool_eta_s=3.0, waited_s=2.0), view) == 1.5
    # Overrun, absurd or switched off: the history decides.
    for eta_s in (0.0, -1.0, math.nan):
        assert ttl_s(adaptive(), turn_of(5, tool_eta_s=eta_s), view) == 8.0
    assert ttl_s(adaptive(use_eta=False), turn_of(5, tool_eta_s=6.0), view) == 8.0


def test_deciding_again_uses_what_the_wait_tells() -> None:
    # Charged by TTL, B = 6, gaps 1, 2, 4, 8: 0.5, 1, 0.5, -2 -> 2.
    view = view_of(history_of([1, 2, 4, 8]))
    plain = {"charge_what_is_used": False}
    assert ttl_s(adaptive(**plain), turn_of(6), view) == 2.0
    # After 2 s, 2 s or 6 s more are left: 3 - 2 = 1, 6 - 6 = 0 -> 2 more.
    late = turn_of(6, waited_s=2.0)
    assert ttl_s(adaptive(**plain), late, view) == 2.0
    assert ttl_s(adaptive(**plain, redecide=False), late, view) == 0.0
    # Longer than anybody has ever been away.
    assert ttl_s(adaptive(), turn_of(6, waited_s=9.0), view) == 0.0


def test_the_papers_default_while_data_are_thin() -> None:
    view = view_of(GapHistory())
    cold = adaptive().decide(turn_of(5), view)
    assert (cold.ttl_s, cold.reason) == (pytest.approx(math.log(5)), "default")
    waited = turn_of(5, waited_s=0.5)
    assert ttl_s(adaptive(), waited, view) == pytest.approx(math.log(5) - 0.5)
    # A quarter of the pool, B = 2 * 5: worth holding for four times ten seconds.
    cheap = view_of(GapHistory(), Pressure(pool_blocks=200, num_waiting=1))
    assert ttl_s(adaptive(), turn_of(5), cheap) == pytest.approx(math.log(40))


def test_people_never_borrow_the_tools_history() -> None:
    view = view_of(history_of([1.0] * 10))
    person = adaptive().decide(turn_of(5, USER_GAP), view)
    assert (person.ttl_s, person.reason) == (pytest.approx(math.log(5)), "default")
    other = adaptive().decide(turn_of(5, GapKey("search")), view)
    assert (other.ttl_s, other.reason) == (1.0, "survival:global")


def test_min_records_counts_gaps_that_never_ended() -> None:
    history = history_of([1, 1])
    history.censor(LS, 1.0)
    view = view_of(history)
    assert adaptive(min_records=2).decide(turn_of(5), view).reason == "survival:key"
    assert adaptive(min_records=3).decide(turn_of(5), view).reason == "default"
    ended_only = adaptive(min_records=2, censored=False)
    assert ended_only.decide(turn_of(5), view).reason == "default"


def test_ski_rental_floor() -> None:
    view = view_of(history_of([1.0] * 4))
    assert ttl_s(adaptive(), turn_of(5), view) == 1.0
    assert ttl_s(adaptive(ski_rental_floor=True), turn_of(5), view) == 5.0
    waited = turn_of(5, waited_s=3.0)
    assert ttl_s(adaptive(ski_rental_floor=True), waited, view) == 2.0


def test_no_benefit_no_pin() -> None:
    view = view_of(history_of([1.0] * 4), wait_s=9.0, eta=-1.0)  # 5 - 9 < 0
    decision = adaptive().decide(turn_of(5), view)
    assert (decision.ttl_s, decision.reason) == (0.0, "no-benefit")


def decisions_then_outcomes(
    policy: Adaptive, gap_s: float, times: int, endings: int = 0
) -> Decision:
    """Plan on gaps of 1 s, B = 5: planned 1 s, ski rental 5 s; then it takes gap_s.

    endings: gaps in the history, beside four others, that are known not to end.
    """
    history = history_of([1.0] * 4)
    for _ in range(endings):
        history.censor(LS, 100.0)
    view, turn = view_of(history), turn_of(5)
    for _ in range(times):
        decision = policy.decide(turn, view)
        policy.observe_outcome(LS, gap_s, decision.ttl_s, decision.inputs)
    return policy.decide(turn, view)


def test_predictions_that_lose_to_ski_rental_are_overruled() -> None:
    # Gaps of 2 s: planned pays 1 + 5 each, ski rental 2.
    policy = adaptive(min_outcomes=10)
    assert decisions_then_outcomes(policy, 2.0, times=9).reason == "survival:key"
    overruled = decisions_then_outcomes(policy, 2.0, times=1)
    assert (overruled.ttl_s, overruled.reason) == (5.0, "ski-rental:regret")
    # Switched off, or proved right again: gaps of 60 s cost 1 + 5 against 5 + 5.
    stubborn = adaptive(min_outcomes=10, ski_rental_fallback=False)
    assert decisions_then_outcomes(stubborn, 2.0, times=20).ttl_s == 1.0
    assert decisions_then_outcomes(policy, 60.0, times=30).reason == "survival:key"


def test_a_program_that_never_returns_loses_nothing_but_rent() -> None:
    policy = adaptive(min_outcomes=1)
    # Planned pays 1 s of rent, ski rental 5.
    assert decisions_then_outcomes(policy, math.inf, times=5).ttl_s == 1.0


def test_returns_pay_for_the_endings_that_nobody_reports() -> None:
    # Half of the gaps never end: with each gap of 2 s, planned 1 + 5 against 2, goes an
    # ending, 1 against 5. Together 7 and 7.
    policy = adaptive(min_outcomes=10)
    told = decisions_then_outcomes(policy, 2.0, times=20, endings=4)
    assert (told.ttl_s, told.reason) == (1.0, "survival:key")
    # What is reported in the end was paid for already.
    silent = adaptive(min_outcomes=10)
    decisions_then_outcomes(silent, 2.0, times=9, endings=0)
    assert decisions_then_outcomes(silent, math.inf, times=20).reason == "survival:key"
    overruled = decisions_then_outcomes(silent, 2.0, times=1)
    assert overruled.reason == "ski-rental:regret"


def test_hardly_any_return_is_no_division_by_zero() -> None:
    policy = adaptive(min_outcomes=1)
    decision = decisions_then_outcomes(policy, 1.0, times=5, endings=4_000)
    assert math.isfinite(decision.ttl_s)


def test_outcomes_without_a_plan_teach_nothing() -> None:
    policy = adaptive(min_outcomes=1)
    policy.observe_outcome(LS, 2.0, 1.0)
    policy.observe_outcome(LS, 2.0, 1.0, {"benefit_s": 5.0, "price": 1.0})
    policy.observe_outcome(
        LS, math.nan, 1.0, {"benefit_s": 5, "price": 1, "planned_s": 1, "ski_s": 5}
    )
    view = view_of(history_of([1.0] * 4))
    assert policy.decide(turn_of(5), view).reason == "survival:key"
