"""A recording as trace events: opens in ui.perfetto.dev and chrome://tracing.

One process a program, tracks for its turns and for its pins, and a counter of pinned
blocks. Format: the Trace Event Format's JSON object with `traceEvents`; "X"
are complete events, "C" counters, "M" names; times are microseconds.
"""

from __future__ import annotations

from typing import Any

from ttlcache.analysis.recording import PinLog, ProgramLog, Recording, TurnLog

#: First track of each kind; turns or pins of branches at the same time get more.
_TURNS, _PINS = 1, 1001
_COUNTERS = 0  # the process that carries what belongs to nobody
_STILL = "still held"


def export(recording: Recording) -> dict[str, Any]:
    """The trace as a JSON-serialisable object; times start at the first arrival."""
    events: list[dict[str, Any]] = []
    if recording.programs:
        origin_s = min(log.arrive_s for log in recording.programs)
        for pid, log in enumerate(recording.programs, 1):
            events += _program(pid, log, origin_s, recording.last_s)
        events.append(_name("process_name", _COUNTERS, 0, "ttlcache"))
        events += _pinned(recording, origin_s)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _program(
    pid: int, log: ProgramLog, origin_s: float, last_s: float
) -> list[dict[str, Any]]:
    turns, pins = _Lanes(_TURNS), _Lanes(_PINS)
    events = []
    for turn in log.turns:
        lane = turns.take(turn.arrive_s, turn.finish_s or last_s)
        events += _turn(pid, lane, turn, origin_s, last_s)
        if turn.pin is not None:
            end_s = turn.pin.end_s or last_s
            lane = pins.take(turn.pin.start_s, end_s)
            events.append(_pin(pid, lane, turn, turn.pin, end_s, origin_s))
    names = [_name("process_name", pid, 0, log.program)]
    names += [_name("thread_name", pid, lane, "turns") for lane in turns.used]
    names += [_name("thread_name", pid, lane, "pins") for lane in pins.used]
    return names + events


class _Lanes:
    """Tracks on which no two spans overlap: viewers draw only nested ones right."""

    def __init__(self, first: int) -> None:
        self._first = first
        self._ends: list[float] = []

    @property
    def used(self) -> range:
        return range(self._first, self._first + len(self._ends))

    def take(self, start_s: float, end_s: float) -> int:
        for lane, free_s in enumerate(self._ends):
            if free_s <= start_s:
                self._ends[lane] = end_s
                return self._first + lane
        self._ends.append(end_s)
        return self._first + len(self._ends) - 1


def _turn(
    pid: int, lane: int, turn: TurnLog, origin_s: float, last_s: float
) -> list[dict[str, Any]]:
    """Its wait and its run; what had not ended ends with the recording."""
    started_s = last_s if turn.wait_s is None else turn.arrive_s + turn.wait_s
    events = []
    if started_s > turn.arrive_s:
        events.append(_span("wait", pid, lane, turn.arrive_s, started_s, origin_s))
    if turn.wait_s is None:
        return events
    args = {
        "prompt_tokens": turn.prompt_tokens,
        "cached_tokens": turn.cached_tokens,
        "claimed_pin": turn.claimed_pin,
        "saved_tokens": turn.saved_tokens,
        "rule": turn.rule,
    }
    name = "turn" if turn.finish_s is not None else "turn, unfinished"
    end_s = turn.finish_s or last_s
    run = _span(name, pid, lane, started_s, end_s, origin_s)
    return [*events, {**run, "args": args}]


def _pin(
    pid: int, lane: int, turn: TurnLog, pin: PinLog, end_s: float, origin_s: float
) -> dict[str, Any]:
    decided = turn.decided
    tool = decided.tool if decided is not None else "pin"
    args = {
        "outcome": pin.outcome or _STILL,
        "ttl_s": pin.ttl_s,
        "kv_blocks": pin.kv_blocks,
        "reason": decided.reason if decided is not None else "",
    }
    name = f"{tool}: {pin.outcome or _STILL}"
    span = _span(name, pid, lane, pin.start_s, end_s, origin_s)
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
        pin = turn.pin
        if pin is None:
            continue
        held = 0
        for now_s, blocks in [(pin.start_s, pin.kv_blocks), *pin.sizes]:
            changes.append((now_s, blocks - held))
            held = blocks
        if pin.end_s is not None:
            changes.append((pin.end_s, -held))
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
