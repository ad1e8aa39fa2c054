"""Why each turn of a program was kept or not, and what that was worth, as text."""

from __future__ import annotations

from ttlcache.analysis.recording import ProgramLog, TurnLog
from ttlcache.types import PinOutcome

#: How a pin ended -> as a sentence goes on that begins with it.
_ENDS = {
    "claimed": "was claimed",
    "expired": "expired",
    "victim": "gave its memory to others (victim)",
    "superseded": "was superseded by another turn",
    "ended": "was released with its program",
    "reset": "was dropped by a reset",
}


def claim_text(turn: TurnLog, before: TurnLog | None, *, first: bool) -> str:
    """Which pin a turn claimed, or why it claimed none."""
    if turn.claimed_pin is not None:
        return f"claimed pin {turn.claimed_pin}{_saved_text(turn)}"
    if turn.wait_s is None:
        return "never got memory"
    if first and turn.follows is None:
        return "first turn: nothing to claim"
    if turn.follows is None:
        return f"{turn.relation}: extends no awaited turn of its program"
    if before is None:
        return "the turn before it is not in this recording"
    return _lost_text(turn, before)


def _saved_text(turn: TurnLog) -> str:
    """What the claim was worth, against plain vLLM's prefix cache."""
    claimed, saved = turn.claimed_tokens, turn.saved_tokens
    if not saved:
        return f": {claimed:,} tokens, all of which plain vLLM would have kept"
    return (
        f": {claimed:,} tokens, of which plain vLLM would have evicted {saved:,}, "
        f"{turn.saved_s:.3g} s of prefill saved"
    )


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
        return f"no pin: no room under max_pinned_fraction, or others hold it{hit}"
    if pin.outcome is None or pin.end_s is None:
        return f"pin {pin.pin} was still held by another request{hit}"
    early_s = turn.arrive_s - pin.end_s
    when = f"{early_s:.3g} s before" if early_s >= 0 else f"{-early_s:.3g} s after"
    ended = _ENDS.get(pin.outcome, pin.outcome)
    return f"pin {pin.pin} {ended} {when} it came{hit}"


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
    ended = _ENDS.get(pin.outcome, pin.outcome)
    last = "; no next turn came" if turn.pin_outcome == PinOutcome.NO_RETURN else ""
    return f"pin {pin.pin} {ended} after {pin.lived_s:.3g} s{changes}{last}"
