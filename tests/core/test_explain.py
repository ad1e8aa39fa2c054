"""What `ttlcache explain` says of a turn and of its pin, and what it compares with."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ttlcache.analysis.explain import after_text, claim_text
from ttlcache.analysis.hindsight import best_constant_s, constant_s, cost_s, oracle_s
from ttlcache.analysis.recording import Decided, PinLog, ProgramLog, TurnLog


def turn(**changes):
    """A second turn that came at 100 s and found nothing."""
    came = {"turn": 2, "arrive_s": 100.0, "follows": 1}
    went = {"wait_s": 0.5, "relation": "continues", "finish_s": 110.0}
    return TurnLog(**{**came, **went, "completed": True, **changes})


def decided(ttl_s=5.0, kv_blocks=10):
    return {"decided": Decided("bash", ttl_s, "ecdf:tool", {}, kv_blocks, 1.0)}


def pinned(outcome=None, end_s=None, *changes):
    log = PinLog(7, 90.0, 10, outcome, end_s)
    log.changes.extend(changes)
    return {**decided(), "pin": log}


CLAIMED = {"claimed_pin": 7, "claimed_tokens": 160}


SAVED = {**CLAIMED, "saved_tokens": 96, "saved_s": 1.25}
BRANCH = {"follows": None, "relation": "branches"}
REJECTED = {**decided(), "rejected": ("ttl", "tool_type")}


@pytest.mark.parametrize(
    ("now", "before", "told"),
    [
        (SAVED, decided(), "160 tokens, of which plain vLLM would have evicted 96, "),
        (CLAIMED, decided(), "pin 7: 160 tokens, all of which plain vLLM would"),
        ({"wait_s": None}, decided(), "never got memory"),
        (BRANCH, None, "branches: extends no open turn"),
        ({}, None, "not in this recording"),
        ({}, REJECTED, "hints rejected (ttl, tool_type)"),
        ({"cached_tokens": 32}, {}, "not decided on; 32 tokens were cached anyway"),
        ({}, decided(kv_blocks=0), "does not fill one KV block"),
        ({}, decided(ttl_s=0.0), "ecdf:tool gave 0 s"),
        ({}, decided(), "no room under max_pinned_fraction"),
        ({}, pinned(), "still held by another request"),
        ({}, pinned("expired", 95.0), "expired 5 s before it came"),
        ({}, pinned("victim", 102.0), "(victim) 2 s after it came"),
    ],
)
def test_why_a_turn_claimed_what_it_claimed(now, before, told):
    earlier = None if before is None else turn(turn=1, **before)
    assert told in claim_text(turn(**now), earlier, first=False)


def test_a_first_turn_has_nothing_to_claim():
    assert "first turn" in claim_text(turn(follows=None), None, first=True)


CHANGE = (95.0, "re-decided: 3 s from then")
GONE_TOO_EARLY = {**pinned("expired", 95.0), "next_gap_s": 9.0}


@pytest.mark.parametrize(
    ("now", "how", "text"),
    [
        ({"finish_s": None}, "", "did not finish"),
        ({"completed": False}, "", "aborted or failed: not retained"),
        ({}, "last_step", "program over (last_step)"),
        ({}, "", "no decision"),
        (decided(), "", "not kept"),
        (pinned(None, None, CHANGE), "", f"pin 7: still held; {CHANGE[1]}"),
        (
            pinned("claimed", 92.5, CHANGE),
            "",
            f"pin 7 was claimed after 2.5 s; {CHANGE[1]}",
        ),
        (GONE_TOO_EARLY, "", "pin 7 expired after 5 s"),
        (pinned("expired", 95.0), "idle", "pin 7 expired after 5 s; no next turn came"),
    ],
)
def test_what_became_of_a_turn(now, how, text):
    log = ProgramLog("p", "run", [turn(**now)], how=how)
    assert after_text(log.turns[0], log) == text


def test_an_undecided_turn_in_mid_program_is_not_its_end():
    log = ProgramLog("p", "run", [turn(), turn(turn=3)], how="last_step")
    assert after_text(log.turns[0], log) == "no decision"


# --- the references, against trying everything ----------------------------------

INF = float("inf")
SECONDS = st.sampled_from([0.0, 0.25, 1.0, 1.5, 2.0, 7.0, 40.0])


def judged(gap_s, benefit_s=3.0, price=1.0, **more):
    inputs = {"benefit_s": benefit_s, "price": price}
    decided = Decided("bash", 5.0, "test", inputs, 4, benefit_s)
    return TurnLog(1, 0.0, decided=decided, next_gap_s=gap_s, **more)


TURNS = st.lists(
    st.builds(judged, st.none() | SECONDS, SECONDS, st.sampled_from([0.0, 0.5, 2.0])),
    max_size=8,
)


@given(TURNS, st.sampled_from([0.0, 1.5, INF]))
def test_no_constant_is_better_than_the_best_nor_the_oracle_worse(turns, max_ttl_s):
    found = best_constant_s(turns, max_ttl_s)
    assert 0.0 <= found <= max_ttl_s

    def total_s(ttl_s):
        return sum(constant_s(each, ttl_s) for each in turns)

    for step in range(161):
        ttl_s = step / 4
        if ttl_s <= max_ttl_s:
            assert total_s(found) <= total_s(ttl_s) + 1e-9
    shorter = [t.next_gap_s for t in turns if (t.next_gap_s or 0.0) < found]
    assert all(total_s(s or 0.0) > total_s(found) - 1e-9 for s in shorter)
    for each in turns:
        assert oracle_s(each, max_ttl_s) <= constant_s(each, found) + 1e-9


def test_known_costs():
    # Gaps of 1 s are worth 3 s, the one of 10 s is not.
    turns = [judged(1.0), judged(1.0), judged(10.0), judged(None)]
    assert best_constant_s(turns, INF) == 1.0
    assert [constant_s(each, 1.0) for each in turns] == [1.0, 1.0, 4.0, 1.0]
    assert [oracle_s(each, INF) for each in turns] == [1.0, 1.0, 3.0, 0.0]
    assert best_constant_s(turns, 0.5) == 0.0
    assert oracle_s(turns[0], 0.5) == 3.0
    # Memory that nobody wants is held for ever.
    assert best_constant_s([judged(10.0, price=0.0)], INF) == 10.0
    assert best_constant_s([], INF) == 0.0


def test_what_a_turn_did_cost():
    pin = PinLog(1, 0.0, 4, "claimed", end_s=2.0)
    assert cost_s(judged(2.0, pin=pin, next_claimed=True)) == 2.0
    assert cost_s(judged(2.0, pin=pin)) == 5.0
    assert cost_s(judged(None, pin=pin)) == 2.0
    assert cost_s(judged(2.0)) == 3.0
    assert cost_s(judged(2.0, pin=PinLog(1, 0.0, 4))) is None
    assert cost_s(TurnLog(1, 0.0)) is None
    with pytest.raises(ValueError, match="nothing was decided"):
        oracle_s(TurnLog(1, 0.0, next_gap_s=1.0), INF)
