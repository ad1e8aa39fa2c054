"""The references of `ttlcache explain`, against trying everything."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ttlcache.analysis.hindsight import best_constant_s, constant_s, cost_s, oracle_s
from ttlcache.analysis.recording import Decided, PinLog, TurnLog

INF = float("inf")
SECONDS = st.sampled_from([0.0, 0.25, 1.0, 1.5, 2.0, 7.0, 40.0])


def turn(
    gap_s: float | None, benefit_s: float = 3.0, price: float = 1.0, **more: object
) -> TurnLog:
    inputs = {"benefit_s": benefit_s, "price": price}
    decided = Decided("bash", 5.0, "test", inputs, 4, benefit_s)
    return TurnLog(1, "r", 0.0, decided=decided, next_gap_s=gap_s, **more)


TURNS = st.lists(
    st.builds(turn, st.none() | SECONDS, SECONDS, st.sampled_from([0.0, 0.5, 2.0])),
    max_size=8,
)


@given(TURNS, st.sampled_from([0.0, 1.5, INF]))
def test_no_constant_is_better_than_the_best(turns, max_ttl_s):
    found = best_constant_s(turns, max_ttl_s)
    assert 0.0 <= found <= max_ttl_s

    def total_s(ttl_s: float) -> float:
        return sum(constant_s(each, ttl_s) for each in turns)

    for step in range(161):
        ttl_s = step / 4
        if ttl_s <= max_ttl_s:
            assert total_s(found) <= total_s(ttl_s) + 1e-9
    shorter = [t.next_gap_s for t in turns if (t.next_gap_s or 0.0) < found]
    assert all(total_s(s or 0.0) > total_s(found) - 1e-9 for s in shorter)


@given(TURNS, st.sampled_from([0.0, 1.5, INF]))
def test_the_oracle_is_never_worse_than_a_constant(turns, max_ttl_s):
    ttl_s = best_constant_s(turns, max_ttl_s)
    for each in turns:
        assert oracle_s(each, max_ttl_s) <= constant_s(each, ttl_s) + 1e-9


def test_known_costs():
    # Gaps of 1 s are worth 3 s, the one of 10 s is not.
    turns = [turn(1.0), turn(1.0), turn(10.0), turn(None)]
    assert best_constant_s(turns, INF) == 1.0
    assert [constant_s(each, 1.0) for each in turns] == [1.0, 1.0, 4.0, 1.0]
    assert [oracle_s(each, INF) for each in turns] == [1.0, 1.0, 3.0, 0.0]
    assert best_constant_s(turns, 0.5) == 0.0
    assert oracle_s(turns[0], 0.5) == 3.0
    # Memory that nobody wants is held for ever.
    assert best_constant_s([turn(10.0, price=0.0)], INF) == 10.0
    assert best_constant_s([], INF) == 0.0


def test_what_a_turn_did_cost():
    pin = PinLog(1, 0.0, 4, 5.0, "claimed", end_s=2.0)
    assert cost_s(turn(2.0, pin=pin, next_claimed=True)) == 2.0
    assert cost_s(turn(2.0, pin=pin)) == 5.0
    assert cost_s(turn(None, pin=pin)) == 2.0
    assert cost_s(turn(2.0)) == 3.0
    assert cost_s(turn(2.0, pin=PinLog(1, 0.0, 4, 5.0))) is None
    assert cost_s(TurnLog(1, "r", 0.0)) is None
    with pytest.raises(ValueError, match="nothing was decided"):
        oracle_s(TurnLog(1, "r", 0.0, next_gap_s=1.0), INF)
