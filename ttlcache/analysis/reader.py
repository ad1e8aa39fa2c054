"""Reads what `ttlcache.telemetry.recorder` wrote, line by line.

A recording that was cut off in mid-line (SIGKILL, a full disk) is read up to there;
lines of a later version are skipped.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ttlcache.analysis.recording import (
    Decided,
    PinLog,
    ProgramLog,
    Recording,
    RecordingError,
    TurnLog,
)
from ttlcache.programs.divergence import Cause, Divergence
from ttlcache.telemetry.recorder import FORMAT


def load(place: Path) -> Recording:
    """A recording: its folder, or one of its files.

    Raises:
        RecordingError: there is none.
    """
    files = sorted(place.glob("events-*.jsonl")) if place.is_dir() else [place]
    if not files or not all(path.is_file() for path in files):
        raise RecordingError(
            f"{place}: expected a folder with events-*.jsonl (record_path), or one "
            "such file"
        )
    reader = _Reader()
    for path in files:
        reader.read(path)
    if not reader.runs:
        raise RecordingError(f"{place}: no recording of ttlcache in it")
    return reader.result()


class _Reader:
    """Turns lines into programs; files of one run must come in order."""

    def __init__(self) -> None:
        self.runs: dict[str, dict[str, Any]] = {}
        self._jobs: list[ProgramLog] = []
        self._programs: dict[tuple[str, str], ProgramLog] = {}  # the last job of an id
        self._turns: dict[tuple[str, int], TurnLog] = {}
        self._run = ""
        self._offset_s = 0.0

    def read(self, path: Path) -> None:
        self._run = ""  # until the file says that it is one of ours
        for line in _lines(path):
            # A line of another version, or one that a bad disk changed.
            with contextlib.suppress(KeyError, TypeError, ValueError):
                self._read_line(path, line)

    def _read_line(self, path: Path, line: dict[str, Any]) -> None:
        kind = line.get("ev")
        if kind == "start":
            if line.get("format") == FORMAT:
                self._offset_s = float(line.get("wall_minus_clock_s", 0.0))
                self._run = path.name.rsplit("-", 1)[0]
                self.runs.setdefault(self._run, line)
            return
        if not self._run:
            return
        now_s = float(line["t"]) + self._offset_s
        if kind == "arrive":
            self._arrive(now_s, line)
        elif kind == "end":
            program = self._program(line)
            program.end_s, program.how = now_s, line["how"]
        # None where its arrival went with a file that was rotated away.
        elif turn := self._turns.get((self._run, line["turn"])):
            if kind == "admit":
                self._admit(turn, now_s, line)
            elif kind == "finish":
                turn.finish_s, turn.completed = now_s, line["completed"]
            elif kind == "decide":
                turn.decided = _decided(line)
            elif kind == "pin":
                turn.pin = PinLog(line["pin"], now_s, line["kv_blocks"])
            elif turn.pin is not None:
                _change_pin(turn.pin, now_s, line)

    def result(self) -> Recording:
        programs = [log for log in self._jobs if log.turns]
        programs.sort(key=lambda log: log.arrive_s)
        return Recording(programs, self.runs)

    def _program(self, line: Mapping[str, Any]) -> ProgramLog:
        """The job of this id; of one that has ended a client may begin another."""
        key = (self._run, line["program"])
        known = self._programs.get(key)
        if known is None or (known.how and line["ev"] == "arrive"):
            known = self._programs[key] = ProgramLog(line["program"], self._run)
            self._jobs.append(known)
        return known

    def _arrive(self, now_s: float, line: Mapping[str, Any]) -> None:
        turn = TurnLog(
            turn=line["turn"],
            request=line["request"],
            arrive_s=now_s,
            prompt_tokens=line["prompt_tokens"],
            rule=line["rule"],
            relation=line["relation"],
            follows=line["follows"],
            gap_s=line["gap_s"],
            rejected=tuple(line["rejected"]),
            divergence=_divergence(line),
        )
        self._turns[self._run, turn.turn] = turn
        self._program(line).turns.append(turn)
        before = self._turns.get((self._run, turn.follows or 0))
        if before is not None and before.next_gap_s is None:
            before.next_gap_s = turn.gap_s

    def _admit(self, turn: TurnLog, now_s: float, line: Mapping[str, Any]) -> None:
        if line["again"]:
            turn.preemptions += 1
            return
        turn.admit_s, turn.wait_s = now_s, line["wait_s"]
        turn.cached_tokens = line["cached_tokens"]
        turn.claimed_pin = line["pin"]
        turn.claimed_tokens = line["claimed_tokens"]
        turn.saved_tokens = line["saved_tokens"]
        turn.saved_s = line["saved_s"]
        turn.memory_wait_s = line["memory_wait_s"]
        turn.refused_for_growth = line.get("refused_for_growth", False)
        before = self._turns.get((self._run, turn.follows or 0))
        if before is not None and turn.claimed_pin is not None:
            before.next_claimed = True


def _change_pin(pin: PinLog, now_s: float, line: Mapping[str, Any]) -> None:
    if line["ev"] == "extend":
        what = f"{line['why']}: {line['ttl_s']:.3g} s from then"
        pin.changes.append((now_s, what))
    elif line["ev"] == "shrink":
        pin.changes.append((now_s, f"shrunk to {line['kv_blocks']} blocks"))
        pin.sizes.append((now_s, line["kv_blocks"]))
    elif line["ev"] == "unpin":
        pin.outcome, pin.end_s = line["outcome"], now_s


def _decided(line: Mapping[str, Any]) -> Decided:
    inputs = {
        name: float(v)
        for name, v in line["inputs"].items()
        if isinstance(v, int | float) or v in ("inf", "-inf")
    }
    ttl_s = float(line["ttl_s"])
    names = Decided.__dataclass_fields__.keys() - {"inputs", "ttl_s"}
    rest = {name: line[name] for name in names}
    return Decided(ttl_s=ttl_s, inputs=inputs, **rest)


def _divergence(line: Mapping[str, Any]) -> Divergence | None:
    cause = line["diverged"]
    if cause is None:
        return None
    return Divergence(Cause(cause), line["diverged_at"], line["diverged_from"])


def _lines(path: Path) -> Iterable[dict[str, Any]]:
    with path.open(encoding="utf-8", errors="replace") as file:
        for text in file:
            try:
                line = json.loads(text)
            except ValueError:
                continue  # the line on which the process was killed
            if isinstance(line, dict):
                yield line
