"""What clients say about a program between its turns, and what operators ask.

An order is a plain dict, already checked by the adapter that took it:

    {"do": "end", "program_id": …}
    {"do": "progress", "program_id": …, "eta_s": … | "done": …, "total": …}
    {"do": "programs"}

Each may carry "cache_salt", the tenant of the program, and "as_sent", a list of other
spellings of the id: who named the program, and where, decides how it is spelt here.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any

from ttlcache.controller import Controller
from ttlcache.programs.client_values import MAX_SECONDS
from ttlcache.programs.model import Program

#: Programs named in one answer; a screen holds fewer.
MAX_LISTED = 200


def obey(controller: Controller, order: Mapping[str, Any], now_s: float) -> Any:
    """Carry out one order; the answer as plain data."""
    action = order.get("do")
    if action == "programs":
        return _listing(controller, now_s)
    tenant = str(order.get("cache_salt", ""))
    answer: dict[str, Any] = {"known": False}
    for spelling in (order["program_id"], *order.get("as_sent", ())):
        if action == "end":
            answer = {"known": controller.end_program(tenant, str(spelling))}
        else:
            answer = _progress(controller, tenant, str(spelling), order)
        if answer["known"]:
            break
    return answer


def remaining_s(order: Mapping[str, Any], waited_s: float) -> float | None:
    """Seconds until the tool ends: announced, or extrapolated from done of total.

    `elapsed_s` is the tool's own time if the client knows it; else the gap's.
    """
    if "eta_s" in order:
        return float(order["eta_s"])
    done, total = float(order.get("done", 0)), float(order.get("total", 0))
    if done <= 0 or total <= 0:
        return None
    elapsed_s = float(order.get("elapsed_s", waited_s))
    return min(elapsed_s * max(total - done, 0.0) / done, MAX_SECONDS)


def _progress(
    controller: Controller, tenant: str, program_id: str, order: Mapping[str, Any]
) -> dict[str, Any]:
    pins = controller.on_progress(
        tenant, program_id, lambda waited_s: remaining_s(order, waited_s)
    )
    if pins is None:
        return {"known": False}
    return {"known": True, "pins": pins}


def _listing(controller: Controller, now_s: float) -> dict[str, Any]:
    """The most recently active programs, newest first, and totals."""
    seen = (each for each in reversed(controller.programs) if not each.is_empty)
    programs = list(islice(seen, MAX_LISTED))
    totals = controller.telemetry.metrics.totals
    return {
        "programs": [_row(controller, program, now_s) for program in programs],
        "totals": {
            f"{name}:{label}" if label else name: count
            for (name, label), count in sorted(totals.items())
        },
    }


def _row(controller: Controller, program: Program, now_s: float) -> dict[str, Any]:
    pins = [controller.pins.get(turn.pin_id) for turn in program.awaited_turns]
    live = [pin for pin in pins if pin is not None]
    last = program.awaited_turns[-1] if program.awaited_turns else None
    waiting = controller.num_waiting(program)
    return {
        "program": program.program_id,
        "turns": program.turns_finished,
        "running": program.live_requests - waiting,
        "waiting": waiting,
        "tool": str(last.gap_key) if last else "",
        "gap_s": round(now_s - last.finish_s, 3) if last else None,
        "pins": len(live),
        "pinned_blocks": sum(pin.kv_blocks for pin in live),
        "ttl_left_s": round(max(0.0, min(p.deadline_s for p in live) - now_s), 3)
        if live
        else None,
    }
