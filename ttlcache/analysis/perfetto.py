"""A recording as trace events: opens in ui.perfetto.dev and chrome://tracing.

One process a program, tracks for its turns and for its pins, and a counter of pinned
blocks. Format: the Trace Event Format's JSON object with `traceEvents`; "X"
are complete events, "C" counters, "M" names; times are microseconds.
"""

from __future__ import annotations

from typing import Any

from ttlcache.analysis.recording import (
    Decided,
    PinLog,
    ProgramLog,
    Recording,
    TurnLog,
)

#: First track of each kind; turns or pins of branches at the same time get more.
_TURNS, _PINS = 1, 1001
_COUNTERS = 0  # the process that carries what belongs to nobody


def export(recording: Recording) -> dict[str, Any]:
    """The trace as a JSON-serialisable object; times start at the first arrival."""
    trace = _Trace(recording)
    return {"traceEvents": trace.events, "displayTimeUnit": "ms"}


class _Trace:
    """The events of a recording; what had not ended ends with it."""

    def __init__(self, recording: Recording) -> None:
        self.events: list[dict[str, Any]] = []
        if not recording.programs:
            return
        self._origin_s = min(log.arrive_s for log in recording.programs)
        self._last_s = recording.last_s
        for pid, log in enumerate(recording.programs, 1):
            self._program(pid, log)
        self._name("process_name", _COUNTERS, 0, "ttlcache")
        for now_s, blocks in pinned_over_time(recording):
            counter = {"ts": self._us(now_s), "args": {"blocks": blocks}}
            self._add("C", "pinned blocks", _COUNTERS, **counter)

    def _program(self, pid: int, log: ProgramLog) -> None:
        self._name("process_name", pid, 0, log.program)
        turns, pins = _Lanes(_TURNS), _Lanes(_PINS)
        for turn in log.turns:
            end_s = turn.finish_s or self._last_s
            self._turn(pid, turns.take(turn.arrive_s, end_s), turn, end_s)
            if turn.pin is not None:
                end_s = turn.pin.end_s or self._last_s
                lane = pins.take(turn.pin.start_s, end_s)
                self._pin(pid, lane, turn.decided, turn.pin, end_s)
        for lanes, name in ((turns, "turns"), (pins, "pins")):
            for lane in lanes.used:
                self._name("thread_name", pid, lane, name)

    def _turn(self, pid: int, lane: int, turn: TurnLog, end_s: float) -> None:
        """Its wait and its run."""
        wait_s = turn.wait_s
        started_s = self._last_s if wait_s is None else turn.arrive_s + wait_s
        if started_s > turn.arrive_s:
            self._span("wait", pid, lane, turn.arrive_s, started_s)
        if wait_s is None:
            return
        args = {
            "prompt_tokens": turn.prompt_tokens,
            "cached_tokens": turn.cached_tokens,
            "claimed_pin": turn.claimed_pin,
            "saved_tokens": turn.saved_tokens,
            "rule": turn.rule,
        }
        name = "turn" if turn.finish_s is not None else "turn, unfinished"
        self._span(name, pid, lane, started_s, end_s, args=args)

    def _pin(
        self, pid: int, lane: int, decided: Decided | None, pin: PinLog, end_s: float
    ) -> None:
        outcome = pin.outcome or "still held"
        args = {
            "outcome": outcome,
            "ttl_s": pin.ttl_s,
            "kv_blocks": pin.kv_blocks,
            "reason": decided.reason if decided is not None else "",
        }
        tool = decided.tool if decided is not None else "pin"
        self._span(f"{tool}: {outcome}", pid, lane, pin.start_s, end_s, args=args)

    def _name(self, kind: str, pid: int, tid: int, name: str) -> None:
        self._add("M", kind, pid, tid=tid, args={"name": name})

    def _span(
        self, name: str, pid: int, tid: int, start_s: float, end_s: float, **more: Any
    ) -> None:
        times = {"ts": self._us(start_s), "dur": _us(end_s - start_s)}
        self._add("X", name, pid, tid=tid, **times, **more)

    def _add(self, phase: str, name: str, pid: int, **more: Any) -> None:
        self.events.append({"name": name, "ph": phase, "pid": pid, **more})

    def _us(self, now_s: float) -> float:
        return _us(now_s - self._origin_s)


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


def _us(seconds: float) -> float:
    return round(max(0.0, seconds) * 1e6, 1)
