"""Why each turn of a program was kept or not, and what that was worth.

The cost of a turn is what the policies themselves reckon with: `price` times the
seconds held, plus B if the next turn came and found nothing. The oracle knows the gap
and pays min(price * gap, B); the constant is ski rental's, TTL = B / price for every
turn. Regret is the cost above theirs.
"""

from __future__ import annotations

from dataclasses import dataclass

from ttlcache.recording import Decided, ProgramLog, TurnLog


@dataclass(frozen=True, slots=True)
class Verdict:
    """One turn. Costs are None where no decision was recorded.

    claim: how the turn began: which pin it claimed, or why none.
    after: what was decided at its end, and what became of it.
    """

    turn: TurnLog
    number: int
    claim: str
    after: str
    cost_s: float | None = None
    oracle_s: float | None = None
    constant_s: float | None = None

    @property
    def claimed(self) -> bool:
        return self.turn.claimed_pin is not None


def verdicts(log: ProgramLog) -> list[Verdict]:
    """One verdict a turn, in order of arrival."""
    by_turn = {turn.turn: turn for turn in log.turns}
    return [
        _verdict(turn, number, by_turn.get(turn.follows or 0), log)
        for number, turn in enumerate(log.turns, 1)
    ]


def _verdict(
    turn: TurnLog, number: int, before: TurnLog | None, log: ProgramLog
) -> Verdict:
    claim = claim_text(turn, before, first=number == 1)
    after = after_text(turn, log)
    decided = turn.decided
    if decided is None:
        return Verdict(turn, number, claim, after)
    held_s = turn.pin.lived_s if turn.pin is not None else 0.0
    cost_s = _cost_s(decided, held_s, turn)
    ski_s = decided.benefit_s / decided.price if decided.price else 0.0
    return Verdict(
        turn,
        number,
        claim,
        after,
        cost_s,
        _oracle_s(decided, turn.next_gap_s),
        _constant_s(decided, ski_s, turn.next_gap_s),
    )


def _cost_s(decided: Decided, held_s: float, turn: TurnLog) -> float:
    lost = turn.next_gap_s is not None and not turn.next_claimed
    return decided.price * held_s + (decided.benefit_s if lost else 0.0)


def _oracle_s(decided: Decided, gap_s: float | None) -> float:
    if gap_s is None:
        return 0.0
    return min(decided.price * gap_s, decided.benefit_s)


def _constant_s(decided: Decided, ttl_s: float, gap_s: float | None) -> float:
    if gap_s is None:
        return decided.price * ttl_s
    missed = decided.benefit_s if gap_s > ttl_s else 0.0
    return decided.price * min(gap_s, ttl_s) + missed


def claim_text(turn: TurnLog, before: TurnLog | None, *, first: bool) -> str:
    """Which pin a turn claimed, or why it claimed none."""
    if turn.claimed_pin is not None:
        return f"claimed pin {turn.claimed_pin}, {turn.saved_s:.3g} s of prefill saved"
    if turn.wait_s is None:
        return "never got memory"
    if first:
        return "first turn: nothing to claim"
    if turn.follows is None:
        return f"{turn.relation}: extends no open turn of its program"
    if before is None:
        return "the turn before it is not in this recording"
    return _lost_text(turn, before)


def _lost_text(turn: TurnLog, before: TurnLog) -> str:
    pin, decided = before.pin, before.decided
    hit = f"; {turn.cached_tokens} tokens were cached anyway"
    hit = hit if turn.cached_tokens else ""
    if before.rejected:
        return f"no pin: hints rejected ({', '.join(before.rejected)}){hit}"
    if decided is None:
        return f"no pin: the turn before was not decided on{hit}"
    if decided.kv_blocks <= 0:
        return "no pin: the context does not fill one KV block"
    if pin is None and decided.ttl_s <= 0:
        return f"no pin: {decided.reason} gave 0 s{hit}"
    if pin is None:
        return f"no pin: no room under max_pinned_fraction{hit}"
    if pin.outcome is None or pin.end_s is None:
        return f"pin {pin.pin} was still held by another request{hit}"
    early_s = turn.arrive_s - pin.end_s
    when = f"{early_s:.3g} s before" if early_s >= 0 else f"{-early_s:.3g} s after"
    return f"pin {pin.pin} {pin.outcome} {when} it came{hit}"


def after_text(turn: TurnLog, log: ProgramLog) -> str:
    """What was decided at a turn's end and what became of it."""
    if turn.finish_s is None:
        return "did not finish"
    if not turn.completed:
        return "aborted or failed: not retained"
    decided, pin = turn.decided, turn.pin
    if decided is None:
        is_last = log.turns[-1] is turn
        return f"program over ({log.how})" if is_last and log.how else "no decision"
    if pin is None:
        return "not kept"
    changes = "".join(f"; {what}" for _, what in pin.changes)
    if pin.outcome is None:
        return f"pin {pin.pin}: still held{changes}"
    return f"pin {pin.pin}: {pin.outcome} after {pin.lived_s:.3g} s{changes}"
