"""Reads what `ttlcache.recorder` wrote: programs, their turns, their pins.

All times are seconds since 1970. A recording that was cut off in mid-line (SIGKILL,
a full disk) is read up to there; lines of a later version are skipped.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ttlcache.recorder import FORMAT


class RecordingError(ValueError):
    """Nothing readable at the given place; the text says what was expected."""


@dataclass(slots=True)
class PinLog:
    """A pin's life.

    kv_blocks: as it began. changes: (time, what) of its extensions and shrinkings.
    sizes: (time, blocks) after each shrinking.
    """

    pin: int
    start_s: float
    kv_blocks: int
    kv_tokens: int
    ttl_s: float
    outcome: str | None = None
    end_s: float | None = None
    changes: list[tuple[float, str]] = field(default_factory=list)
    sizes: list[tuple[float, int]] = field(default_factory=list)

    @property
    def lived_s(self) -> float:
        return 0.0 if self.end_s is None else self.end_s - self.start_s


@dataclass(slots=True)
class Decided:
    """What the policy was asked and answered, see `journal.EVENTS["decide"]`."""

    tool: str
    ttl_s: float
    reason: str
    inputs: dict[str, float]
    context_tokens: int
    kv_blocks: int
    recovery_s: float
    records: int = 0
    free_blocks: int = 0
    pinned_blocks: int = 0
    pool_blocks: int = 0
    running: int = 0
    waiting: int = 0

    @property
    def benefit_s(self) -> float:
        """Seconds that losing the KV would cost: the policy's own, else a reload."""
        return max(0.0, float(self.inputs.get("benefit_s", self.recovery_s)))

    @property
    def price(self) -> float:
        return max(0.0, float(self.inputs.get("price", 1.0)))


@dataclass(slots=True)
class TurnLog:
    """One request from arrival to the arrival of the turn that went on from it.

    gap_s: of the gap before it; next_gap_s: after it, None if nobody came.
    claimed_pin, saved_s: the pin it took over and the prefill seconds that spared.
    """

    turn: int
    request: str
    arrive_s: float
    prompt_tokens: int = 0
    rule: str = ""
    relation: str = ""
    follows: int | None = None
    gap_s: float | None = None
    reusable_tokens: int = 0
    rejected: tuple[str, ...] = ()
    wait_s: float | None = None
    cached_tokens: int = 0
    claimed_pin: int | None = None
    saved_s: float = 0.0
    preemptions: int = 0
    prefill_s: float | None = None
    finish_s: float | None = None
    completed: bool = False
    tokens: int = 0
    decided: Decided | None = None
    pin: PinLog | None = None
    next_gap_s: float | None = None
    next_claimed: bool = False


@dataclass(slots=True)
class ProgramLog:
    """One agent's job in one run of the server."""

    program: str
    run: str
    turns: list[TurnLog] = field(default_factory=list)
    end_s: float | None = None
    how: str = ""

    @property
    def arrive_s(self) -> float:
        return min(turn.arrive_s for turn in self.turns)

    @property
    def depart_s(self) -> float | None:
        """Departure of its last finished turn, None while none has finished."""
        ends = [turn.finish_s for turn in self.turns if turn.finish_s is not None]
        return max(ends) if ends else None

    @property
    def jct_s(self) -> float | None:
        """Job completion time: last departure minus first arrival."""
        depart_s = self.depart_s
        return None if depart_s is None else depart_s - self.arrive_s


@dataclass(slots=True)
class Recording:
    """Programs in order of arrival; `runs` are the heads of the runs read."""

    programs: list[ProgramLog]
    runs: dict[str, dict[str, Any]]
    source: str = "ttlcache"

    def find(self, program: str) -> ProgramLog | None:
        """The program of that id; of several runs the last one's."""
        found = [log for log in self.programs if log.program == program]
        return found[-1] if found else None

    def max_ttl_s(self, log: ProgramLog) -> float:
        """The cap on TTLs in that program's run; none where the head does not say."""
        config = self.runs.get(log.run, {}).get("config", {})
        return float(config.get("max_ttl_s", math.inf))

    @property
    def last_s(self) -> float:
        """When the last thing in it happened, as far as turns and pins tell."""
        found = [log.end_s or log.arrive_s for log in self.programs]
        for _, turn in self.turns():
            pin = turn.pin
            found += [turn.arrive_s, turn.finish_s or 0.0]
            found.append(0.0 if pin is None else pin.end_s or pin.start_s)
        return max(found, default=0.0)

    def turns(self) -> Iterator[tuple[ProgramLog, TurnLog]]:
        for program in self.programs:
            for turn in program.turns:
                yield program, turn


def load(place: Path) -> Recording:
    """A recording: its folder, one of its files, or vllm-continuum's file.

    Raises:
        RecordingError: nothing of either kind is there.
    """
    from ttlcache import continuum_format

    if place.is_dir():
        files = sorted(place.glob("events-*.jsonl"))
        foreign = place / continuum_format.FILE_NAME
        if not files and foreign.is_file():
            return continuum_format.load(foreign)
    else:
        files = [place]
        if place.is_file() and continuum_format.is_one(place):
            return continuum_format.load(place)
    if not files or not all(path.is_file() for path in files):
        raise RecordingError(
            f"{place}: expected a folder with events-*.jsonl (record_path), one such "
            f"file, or vllm-continuum's {continuum_format.FILE_NAME}"
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
        self._programs: dict[tuple[str, str], ProgramLog] = {}
        self._turns: dict[tuple[str, int], TurnLog] = {}
        self._run = ""
        self._offset_s = 0.0
        self._handlers: dict[str, Callable[[float, Mapping[str, Any]], None]] = {
            "arrive": self._arrive,
            "admit": self._admit,
            "first_token": self._first_token,
            "finish": self._finish,
            "decide": self._decide,
            "pin": self._pin,
            "extend": self._extend,
            "shrink": self._shrink,
            "unpin": self._unpin,
            "end": self._end,
        }

    def read(self, path: Path) -> None:
        for line in _lines(path):
            if line.get("ev") == "start":
                if line.get("format") == FORMAT:
                    self._run = path.name.rsplit("-", 1)[0]
                    self._offset_s = float(line.get("wall_minus_clock_s", 0.0))
                    self.runs.setdefault(self._run, line)
                continue
            handler = self._handlers.get(line.get("ev", ""))
            if handler is not None and self._run:
                handler(float(line["t"]) + self._offset_s, line)

    def result(self) -> Recording:
        programs = [log for log in self._programs.values() if log.turns]
        programs.sort(key=lambda log: log.arrive_s)
        return Recording(programs, self.runs)

    def _turn(self, line: Mapping[str, Any]) -> TurnLog | None:
        """None for a turn whose arrival went with a file that was rotated away."""
        return self._turns.get((self._run, line["turn"]))

    def _program(self, line: Mapping[str, Any]) -> ProgramLog:
        key = (self._run, line["program"])
        if key not in self._programs:
            self._programs[key] = ProgramLog(line["program"], self._run)
        return self._programs[key]

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
            reusable_tokens=line["reusable_tokens"],
            rejected=tuple(line["rejected"]),
        )
        self._turns[self._run, turn.turn] = turn
        self._program(line).turns.append(turn)
        before = self._turns.get((self._run, turn.follows or 0))
        if before is not None and before.next_gap_s is None:
            before.next_gap_s = turn.gap_s

    def _admit(self, now_s: float, line: Mapping[str, Any]) -> None:
        turn = self._turn(line)
        if turn is None:
            return
        if line["again"]:
            turn.preemptions += 1
            return
        turn.wait_s = line["wait_s"]
        turn.cached_tokens = line["cached_tokens"]
        turn.claimed_pin = line["pin"]
        turn.saved_s = line["saved_s"]
        before = self._turns.get((self._run, turn.follows or 0))
        if before is not None and turn.claimed_pin is not None:
            before.next_claimed = True

    def _first_token(self, now_s: float, line: Mapping[str, Any]) -> None:
        turn = self._turn(line)
        if turn is not None:
            turn.prefill_s = line["prefill_s"]

    def _finish(self, now_s: float, line: Mapping[str, Any]) -> None:
        turn = self._turn(line)
        if turn is not None:
            turn.finish_s = now_s
            turn.completed = line["completed"]
            turn.tokens = line["tokens"]

    def _decide(self, now_s: float, line: Mapping[str, Any]) -> None:
        turn = self._turn(line)
        if turn is None:
            return
        inputs = {
            name: float(v)
            for name, v in line["inputs"].items()
            if isinstance(v, int | float) or v in ("inf", "-inf")
        }
        ttl_s = float(line["ttl_s"])
        names = Decided.__dataclass_fields__.keys() - {"inputs", "ttl_s"}
        rest = {name: line[name] for name in names if name in line}
        turn.decided = Decided(ttl_s=ttl_s, inputs=inputs, **rest)

    def _pin(self, now_s: float, line: Mapping[str, Any]) -> None:
        turn = self._turn(line)
        if turn is not None:
            size = (line["kv_blocks"], line["kv_tokens"], line["ttl_s"])
            turn.pin = PinLog(line["pin"], now_s, *size)

    def _extend(self, now_s: float, line: Mapping[str, Any]) -> None:
        self._change(now_s, line, f"{line['why']}: {line['ttl_s']:.3g} s from then")

    def _shrink(self, now_s: float, line: Mapping[str, Any]) -> None:
        self._change(now_s, line, f"shrunk to {line['kv_blocks']} blocks")
        turn = self._turn(line)
        if turn is not None and turn.pin is not None:
            turn.pin.sizes.append((now_s, line["kv_blocks"]))

    def _change(self, now_s: float, line: Mapping[str, Any], what: str) -> None:
        turn = self._turn(line)
        if turn is not None and turn.pin is not None:
            turn.pin.changes.append((now_s, what))

    def _unpin(self, now_s: float, line: Mapping[str, Any]) -> None:
        turn = self._turn(line)
        if turn is not None and turn.pin is not None:
            turn.pin.outcome = line["outcome"]
            turn.pin.end_s = now_s

    def _end(self, now_s: float, line: Mapping[str, Any]) -> None:
        program = self._program(line)
        program.end_s, program.how = now_s, line["how"]


def _lines(path: Path) -> Iterable[dict[str, Any]]:
    with path.open(encoding="utf-8", errors="replace") as file:
        for text in file:
            try:
                line = json.loads(text)
            except ValueError:
                continue  # the line on which the process was killed
            if isinstance(line, dict):
                yield line
