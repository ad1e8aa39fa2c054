"""What `ttlcache explain` says of a turn and of its pin."""

import pytest

from ttlcache.analysis.explain import after_text, claim_text
from ttlcache.analysis.recording import Decided, PinLog, ProgramLog, TurnLog


def turn(**changes):
    """A second turn that came at 100 s and found nothing."""
    came = {"turn": 2, "arrive_s": 100.0, "follows": 1}
    went = {"wait_s": 0.5, "relation": "continues", "finish_s": 110.0}
    return TurnLog(**{**came, **went, "completed": True, **changes})


def decided(ttl_s=5.0, kv_blocks=10):
    return {"decided": Decided("bash", ttl_s, "ecdf:tool", {}, kv_blocks)}


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
        (BRANCH, None, "branches: extends no awaited turn"),
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
