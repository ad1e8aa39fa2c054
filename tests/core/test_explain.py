"""One sentence for everything that can become of a turn and of its pin."""

from __future__ import annotations

import pytest

from ttlcache.analysis.explain import after_text, claim_text
from ttlcache.analysis.recording import Decided, PinLog, ProgramLog, TurnLog


def turn(**changes: object) -> TurnLog:
    """A second turn that came at 100 s and found nothing."""
    values = {
        "turn": 2,
        "request": "r2",
        "arrive_s": 100.0,
        "follows": 1,
        "wait_s": 0.5,
        "relation": "continues",
        "finish_s": 110.0,
        "completed": True,
    }
    return TurnLog(**{**values, **changes})  # type: ignore[arg-type]


def decided(ttl_s: float = 5.0, kv_blocks: int = 10) -> Decided:
    return Decided("bash", ttl_s, "ecdf:tool", {}, kv_blocks, 1.0)


def pin(outcome: str | None = None, end_s: float | None = None) -> PinLog:
    return PinLog(7, 90.0, 10, 5.0, outcome, end_s)


def before(**changes: object) -> TurnLog:
    return turn(turn=1, **{"decided": decided(), **changes})


@pytest.mark.parametrize(
    ("now", "earlier", "first", "text"),
    [
        (
            turn(claimed_pin=7, claimed_tokens=160, saved_tokens=96, saved_s=1.25),
            before(),
            False,
            "claimed pin 7: 160 tokens, of which plain vLLM would have evicted 96, "
            "1.25 s of prefill saved",
        ),
        (
            turn(claimed_pin=7, claimed_tokens=160),
            before(),
            False,
            "claimed pin 7: 160 tokens, all of which plain vLLM would have kept",
        ),
        (turn(wait_s=None), before(), False, "never got memory"),
        (turn(follows=None), None, True, "first turn: nothing to claim"),
        (
            turn(follows=None, relation="branches"),
            None,
            False,
            "branches: extends no open turn of its program",
        ),
        (turn(), None, False, "the turn before it is not in this recording"),
        (
            turn(),
            before(rejected=("ttl", "tool_type")),
            False,
            "no pin: hints rejected (ttl, tool_type)",
        ),
        (
            turn(cached_tokens=32),
            before(decided=None),
            False,
            "no pin: the turn before was not decided on; 32 tokens were cached anyway",
        ),
        (
            turn(),
            before(decided=decided(kv_blocks=0)),
            False,
            "no pin: the context does not fill one KV block",
        ),
        (
            turn(),
            before(decided=decided(ttl_s=0.0)),
            False,
            "no pin: ecdf:tool gave 0 s",
        ),
        (turn(), before(), False, "no pin: no room under max_pinned_fraction"),
        (
            turn(),
            before(pin=pin()),
            False,
            "pin 7 was still held by another request",
        ),
        (
            turn(),
            before(pin=pin("expired", 95.0)),
            False,
            "pin 7 expired 5 s before it came",
        ),
        (
            turn(),
            before(pin=pin("victim", 102.0)),
            False,
            "pin 7 gave its memory to others (victim) 2 s after it came",
        ),
    ],
)
def test_why_a_turn_claimed_what_it_claimed(
    now: TurnLog, earlier: TurnLog | None, first: bool, text: str
) -> None:
    assert claim_text(now, earlier, first=first) == text


def changed(log: PinLog) -> PinLog:
    log.changes.append((95.0, "re-decided: 3 s from then"))
    return log


@pytest.mark.parametrize(
    ("now", "how", "text"),
    [
        (turn(finish_s=None), "", "did not finish"),
        (turn(completed=False), "", "aborted or failed: not retained"),
        (turn(), "last_step", "program over (last_step)"),
        (turn(), "", "no decision"),
        (turn(decided=decided()), "", "not kept"),
        (
            turn(decided=decided(), pin=changed(pin())),
            "",
            "pin 7: still held; re-decided: 3 s from then",
        ),
        (
            turn(decided=decided(), pin=changed(pin("claimed", 92.5))),
            "",
            "pin 7 was claimed after 2.5 s; re-decided: 3 s from then",
        ),
    ],
)
def test_what_became_of_a_turn(now: TurnLog, how: str, text: str) -> None:
    assert after_text(now, ProgramLog("p", "run", [now], how=how)) == text


def test_an_undecided_turn_in_mid_program_is_not_its_end() -> None:
    log = ProgramLog("p", "run", [turn(), turn(turn=3)], how="last_step")
    assert after_text(log.turns[0], log) == "no decision"
