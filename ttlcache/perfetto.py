"""A recording as trace events: opens in ui.perfetto.dev and chrome://tracing.

One process a program, one track for its turns and one for its pins, and a counter of
pinned blocks. Format: the Trace Event Format's JSON object with `traceEvents`; "X"
are complete events, "C" counters, "M" names; times are microseconds.
"""

from __future__ import annotations

from typing import Any

from ttlcache.recording import PinLog, ProgramLog, Recording, TurnLog

_TURNS, _PINS = 1, 2
_COUNTERS = 0  # the process that carries what belongs to nobody


def export(recording: Recording) -> dict[str, Any]:
    """The trace as a JSON-serialisable object; times start at the first arrival."""
    events: list[dict[str, Any]] = []
    if recording.programs:
        origin_s = min(log.arrive_s for log in recording.programs)
        for pid, log in enumerate(recording.programs, 1):
            events += _program(pid, log, origin_s)
        events += _pinned(recording, origin_s)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _program(pid: int, log: ProgramLog, origin_s: float) -> list[dict[str, Any]]:
    events = [
        _name("process_name", pid, _TURNS, log.program),
        _name("thread_name", pid, _TURNS, "turns"),
        _name("thread_name", pid, _PINS, "pins"),
    ]
    for turn in log.turns:
        events += _turn(pid, turn, origin_s)
    return events


def _turn(pid: int, turn: TurnLog, origin_s: float) -> list[dict[str, Any]]:
    events = []
    started_s = turn.arrive_s + (turn.wait_s or 0.0)
    if turn.wait_s:
        events.append(_span("wait", pid, _TURNS, turn.arrive_s, started_s, origin_s))
    if turn.finish_s is not None:
        args = {
            "prompt_tokens": turn.prompt_tokens,
            "cached_tokens": turn.cached_tokens,
            "claimed_pin": turn.claimed_pin,
            "rule": turn.rule,
        }
        run = _span("turn", pid, _TURNS, started_s, turn.finish_s, origin_s)
        events.append({**run, "args": args})
    if turn.pin is not None and turn.pin.end_s is not None:
        events.append(_pin(pid, turn, turn.pin, turn.pin.end_s, origin_s))
    return events


def _pin(
    pid: int, turn: TurnLog, pin: PinLog, end_s: float, origin_s: float
) -> dict[str, Any]:
    tool = turn.decided.tool if turn.decided is not None else "pin"
    args = {
        "outcome": pin.outcome,
        "ttl_s": pin.ttl_s,
        "kv_blocks": pin.kv_blocks,
        "reason": turn.decided.reason if turn.decided is not None else "",
    }
    span = _span(f"{tool}: {pin.outcome}", pid, _PINS, pin.start_s, end_s, origin_s)
    return {**span, "args": args}


def _pinned(recording: Recording, origin_s: float) -> list[dict[str, Any]]:
    return [
        {
            "name": "pinned blocks",
            "ph": "C",
            "pid": _COUNTERS,
            "ts": _us(now_s - origin_s),
            "args": {"blocks": blocks},
        }
        for now_s, blocks in pinned_over_time(recording)
    ]


def pinned_over_time(recording: Recording) -> list[tuple[float, int]]:
    """(time, blocks held by pins) at every change; shared blocks count per pin."""
    changes: list[tuple[float, int]] = []
    for _, turn in recording.turns():
        if turn.pin is not None and turn.pin.end_s is not None:
            changes.append((turn.pin.start_s, turn.pin.kv_blocks))
            changes.append((turn.pin.end_s, -turn.pin.kv_blocks))
    level, levels = 0, []
    for now_s, change in sorted(changes):
        level += change
        levels.append((now_s, level))
    return levels


def _name(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


def _span(
    name: str, pid: int, tid: int, start_s: float, end_s: float, origin_s: float
) -> dict[str, Any]:
    return {
        "name": name,
        "ph": "X",
        "pid": pid,
        "tid": tid,
        "ts": _us(start_s - origin_s),
        "dur": _us(end_s - start_s),
    }


def _us(seconds: float) -> float:
    return round(max(0.0, seconds) * 1e6, 1)
