"""Decide again in the middle of a gap, because the client knows more now."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ttlcache.policies.base import View
from ttlcache.programs.model import Program
from ttlcache.retention.open_turns import TurnBook
from ttlcache.retention.pins import PinTable
from ttlcache.retention.ttl import Retention
from ttlcache.telemetry.journal import NullJournal
from ttlcache.types import PinOutcome

#: Seconds waited so far -> seconds that the tool still needs; None: nothing new.
Remaining = Callable[[float], float | None]


def replan(
    program: Program,
    remaining: Remaining,
    pins: PinTable,
    turns: TurnBook,
    retention: Retention,
    journal: NullJournal,
    view: View,
    now_s: float,
) -> list[dict[str, Any]]:
    """New deadlines for the pins of a program whose tool reported.

    A pin that is not worth the rest of the wait is released at once. A pin whose next
    turn already waits is left alone.

    Returns:
        The pins that the program still has, each with its `ttl_left_s`.
    """
    for turn in list(program.open_turns):
        pin = pins.get(turn.pin_id)
        if pin is None or pin.held or turn.facts is None:
            continue
        waited_s = max(0.0, now_s - turn.finish_s)
        left_s = remaining(waited_s)
        if left_s is None:
            continue
        turn.facts = turn.facts._replace(tool_eta_s=waited_s + left_s)
        ttl_s = retention.replan(turn.facts, waited_s, view)
        if ttl_s > 0:
            pins.set_deadline(pin, now_s + ttl_s)
            journal.extend(now_s, pin, "tool progress")
        else:
            turns.end_pin(pin, PinOutcome.EXPIRED)
    live = (pins.get(turn.pin_id) for turn in program.open_turns)
    return [
        {
            "ttl_left_s": round(max(0.0, pin.deadline_s - now_s), 3),
            "kv_blocks": pin.kv_blocks,
            "kv_tokens": pin.kv_tokens,
        }
        for pin in live
        if pin is not None
    ]
