"""Why each turn of a program was kept or not, and what that was worth.

Costs and their references, the oracle and the best constant, come from
`ttlcache.analysis.hindsight`. Regret is the cost above theirs.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from ttlcache.analysis.hindsight import best_constant_s, constant_s, cost_s, oracle_s
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


@dataclass(frozen=True, slots=True)
class Verdict:
    """One turn. Costs are None where no decision was recorded, or a pin still lives.

    claim: how the turn began: which pin it claimed, or why none.
    after: what was decided at its end, and what became of it.
    constant_s: under the TTL that, given to all turns of the program, would have cost
        least.
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


@dataclass(frozen=True, slots=True)
class Group:
    """Turns that are judged together, under the best constant of their own.

    claimed: of the turns after them, those that found the pin. All in seconds.
    """

    name: str
    turns: int
    returned: int
    claimed: int
    cost_s: float
    oracle_s: float
    constant_s: float
    constant_ttl_s: float


def verdicts(log: ProgramLog, max_ttl_s: float = math.inf) -> list[Verdict]:
    """One verdict a turn, in order of arrival.

    Args:
        max_ttl_s: the cap that the references keep, too.
    """
    by_turn = {turn.turn: turn for turn in log.turns}
    ttl_s = best_constant_s(_judged(log), max_ttl_s)
    found = []
    for number, turn in enumerate(log.turns, 1):
        before = by_turn.get(turn.follows or 0)
        claim = claim_text(turn, before, first=number == 1)
        costs: tuple[float, ...] = ()
        if (cost := cost_s(turn)) is not None:
            costs = (cost, oracle_s(turn, max_ttl_s), constant_s(turn, ttl_s))
        found.append(Verdict(turn, number, claim, after_text(turn, log), *costs))
    return found


def by_tool(log: ProgramLog, max_ttl_s: float = math.inf) -> list[Group]:
    """The program as a whole, then each tool, the most frequent first."""
    judged = _judged(log)
    tools = defaultdict(list)
    for turn in judged:
        tools[turn.decided.tool if turn.decided is not None else ""].append(turn)
    ordered = sorted(tools.items(), key=lambda item: -len(item[1]))
    groups = [("all", judged), *ordered]
    return [_group(name, turns, max_ttl_s) for name, turns in groups]


def _judged(log: ProgramLog) -> list[TurnLog]:
    return [turn for turn in log.turns if cost_s(turn) is not None]


def _group(name: str, turns: Sequence[TurnLog], max_ttl_s: float) -> Group:
    ttl_s = best_constant_s(turns, max_ttl_s)
    return Group(
        name=name,
        turns=len(turns),
        returned=sum(turn.next_gap_s is not None for turn in turns),
        claimed=sum(turn.next_claimed for turn in turns),
        cost_s=sum(cost_s(turn) or 0.0 for turn in turns),
        oracle_s=sum(oracle_s(turn, max_ttl_s) for turn in turns),
        constant_s=sum(constant_s(turn, ttl_s) for turn in turns),
        constant_ttl_s=ttl_s,
    )


def claim_text(turn: TurnLog, before: TurnLog | None, *, first: bool) -> str:
    """Which pin a turn claimed, or why it claimed none."""
    if turn.claimed_pin is not None:
        return f"claimed pin {turn.claimed_pin}{_saved_text(turn)}"
    if turn.wait_s is None:
        return "never got memory"
    if first:
        return "first turn: nothing to claim"
    if turn.follows is None:
        return f"{turn.relation}: extends no open turn of its program"
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
        return f"no pin: no room under max_pinned_fraction{hit}"
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
