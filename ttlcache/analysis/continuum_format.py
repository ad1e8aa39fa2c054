"""vllm-continuum's `scheduler_timestamps`: written for its users' scripts, and read.

One JSON object, job id -> list of events in order of time, each event an object whose
first key names it: `Request_arrival_time`, `waiting_to_running` (with `prompt_length`
and `hit_length`), `evicted_to_running` (the same after a preemption),
`Request_evicted_from_running_queue_time`, `Request_departure_time`, `pinned_time`,
`unpinned_time`. Values are seconds since 1970. (Hanchenli/vllm-continuum.)
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from ttlcache.analysis.recording import (
    PinLog,
    ProgramLog,
    Recording,
    RecordingError,
    TurnLog,
)

FILE_NAME = "scheduler_timestamps"
ARRIVES = "Request_arrival_time"
STARTS = "waiting_to_running"
RESUMES = "evicted_to_running"
PREEMPTED = "Request_evicted_from_running_queue_time"
DEPARTS = "Request_departure_time"
PINNED = "pinned_time"
UNPINNED = "unpinned_time"
_EVENTS = {ARRIVES, STARTS, RESUMES, PREEMPTED, DEPARTS, PINNED, UNPINNED}


def export(recording: Recording) -> dict[str, list[dict[str, Any]]]:
    """A recording in that format; of a program in several runs the last one."""
    return {log.program: _events(log) for log in recording.programs}


def _events(log: ProgramLog) -> list[dict[str, Any]]:
    events: list[tuple[float, dict[str, Any]]] = []
    for turn in log.turns:
        events.append((turn.arrive_s, {ARRIVES: turn.arrive_s}))
        if turn.wait_s is not None:
            start_s = turn.arrive_s + turn.wait_s
            lengths = {
                "prompt_length": turn.prompt_tokens,
                "hit_length": turn.cached_tokens,
            }
            events.append((start_s, {STARTS: start_s, **lengths}))
        if turn.finish_s is not None:
            events.append((turn.finish_s, {DEPARTS: turn.finish_s}))
        if turn.pin is not None:
            events.append((turn.pin.start_s, {PINNED: turn.pin.start_s}))
            if turn.pin.end_s is not None:
                events.append((turn.pin.end_s, {UNPINNED: turn.pin.end_s}))
    return [event for _, event in sorted(events, key=lambda pair: pair[0])]


def is_one(path: Path) -> bool:
    """Whether a file is in this format, judged by its first events."""
    try:
        jobs = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    if not isinstance(jobs, dict) or not jobs:
        return False
    first = next(iter(jobs.values()))
    return isinstance(first, list) and all(
        isinstance(event, dict) and bool(_EVENTS & event.keys()) for event in first[:3]
    )


def load(path: Path) -> Recording:
    """Jobs as programs.

    Raises:
        RecordingError: the file is none of these.
    """
    if not is_one(path):
        raise RecordingError(f"{path}: expected vllm-continuum's {FILE_NAME}")
    jobs = json.loads(path.read_text(encoding="utf-8"))
    programs = [_program(str(job), events) for job, events in jobs.items()]
    programs = [log for log in programs if log.turns]
    programs.sort(key=lambda log: log.arrive_s)
    return Recording(programs, {}, source="vllm-continuum")


def _program(job: str, events: list[Any]) -> ProgramLog:
    log = ProgramLog(job, run="")
    for event in events:
        if isinstance(event, dict):
            _add(log, event)
    return log


def _add(log: ProgramLog, event: dict[str, Any]) -> None:
    if ARRIVES in event:
        turn = TurnLog(len(log.turns) + 1, "", float(event[ARRIVES]))
        if log.turns and log.turns[-1].finish_s is not None:
            turn.gap_s = turn.arrive_s - log.turns[-1].finish_s
            log.turns[-1].next_gap_s = turn.gap_s
        log.turns.append(turn)
    elif log.turns:
        _continue(log.turns, event)


def _continue(turns: list[TurnLog], event: dict[str, Any]) -> None:
    """Events do not say whose they are: the oldest turn that lacks it has it."""
    if STARTS in event:
        for turn in _first(t for t in turns if t.wait_s is None):
            turn.wait_s = float(event[STARTS]) - turn.arrive_s
            turn.prompt_tokens = int(event.get("prompt_length", 0))
            turn.cached_tokens = int(event.get("hit_length", 0))
    elif RESUMES in event:
        turns[-1].preemptions += 1
    elif DEPARTS in event:
        for turn in _first(t for t in turns if t.finish_s is None):
            turn.finish_s, turn.completed = float(event[DEPARTS]), True
    elif PINNED in event:
        turn = max(turns, key=lambda t: (t.finish_s or 0.0, t.turn))
        turn.pin = PinLog(turn.turn, float(event[PINNED]), 0, 0, 0.0)
    elif UNPINNED in event:
        for turn in _first(t for t in turns if t.pin and t.pin.end_s is None):
            assert turn.pin is not None
            turn.pin.end_s = float(event[UNPINNED])


def _first(turns: Iterator[TurnLog]) -> Iterator[TurnLog]:
    return islice(turns, 1)
