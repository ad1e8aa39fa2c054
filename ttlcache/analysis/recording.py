"""What a recording holds: programs, their turns, their pins; and where to find it.

All times are seconds since 1970.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ttlcache.programs.divergence import Divergence
from ttlcache.types import PinOutcome

#: (start, end) in seconds.
Interval = tuple[float, float]


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
    outcome: str | None = None
    end_s: float | None = None
    changes: list[tuple[float, str]] = field(default_factory=list)
    sizes: list[tuple[float, int]] = field(default_factory=list)

    @property
    def lived_s(self) -> float:
        return 0.0 if self.end_s is None else self.end_s - self.start_s


@dataclass(slots=True)
class Decided:
    """What the policy was asked and answered, see `Telemetry.decide`."""

    tool: str
    ttl_s: float
    reason: str
    inputs: dict[str, float]
    kv_blocks: int
    records: int = 0
    free_blocks: int = 0
    pinned_blocks: int = 0
    pool_blocks: int = 0
    running: int = 0
    waiting: int = 0


@dataclass(slots=True)
class TurnLog:
    """One request from arrival to the arrival of the turn that went on from it.

    wait_s: until `admit_s`, without the time for which the engine was paused.
    gap_s: of the gap before it; next_gap_s: after it, None if nobody came.
    claimed_pin, claimed_tokens: the pin it took over and what that held of its prompt.
    saved_tokens, saved_s: of those, what plain vLLM's prefix cache would have evicted,
        and the prefill that this spared.
    memory_wait_s: for so long before it got its memory that was refused to it.
    refused_for_growth: it would have fit when it was last refused.
    """

    turn: int
    arrive_s: float
    request: str = ""
    prompt_tokens: int = 0
    rule: str = ""
    relation: str = ""
    follows: int | None = None
    gap_s: float | None = None
    rejected: tuple[str, ...] = ()
    divergence: Divergence | None = None
    admit_s: float | None = None
    wait_s: float | None = None
    cached_tokens: int = 0
    claimed_pin: int | None = None
    claimed_tokens: int = 0
    saved_tokens: int = 0
    saved_s: float = 0.0
    memory_wait_s: float = 0.0
    refused_for_growth: bool = False
    preemptions: int = 0
    finish_s: float | None = None
    completed: bool = False
    decided: Decided | None = None
    pin: PinLog | None = None
    next_gap_s: float | None = None
    next_claimed: bool = False

    @property
    def pin_outcome(self) -> str | None:
        """How its pin ended, as far as the recording goes; None while it lives."""
        outcome = None if self.pin is None else self.pin.outcome
        if outcome == PinOutcome.EXPIRED.value and self.next_gap_s is None:
            return PinOutcome.NO_RETURN.value
        return outcome


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
        """Departure of its last completed turn, None while there is none."""
        ends = [turn.finish_s for turn in self.turns if turn.completed]
        return max((end_s for end_s in ends if end_s is not None), default=None)

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

    @property
    def observed_runs(self) -> set[str]:
        """Runs under policy `observe`: their pins are would-be pins."""
        heads = self.runs.items()
        return {run for run, head in heads if head.get("policy") == "observe"}

    def find(self, program: str) -> ProgramLog | None:
        """The program of that id; of several jobs the last one."""
        found = [log for log in self.programs if log.program == program]
        return found[-1] if found else None

    @property
    def last_s(self) -> float:
        """When the last thing in it happened, as far as turns and pins tell."""
        found = [log.end_s or log.arrive_s for log in self.programs]
        for _, turn in self.turns():
            pin = turn.pin
            found += [turn.arrive_s, turn.finish_s or 0.0]
            found.append(0.0 if pin is None else pin.end_s or pin.start_s)
        return max(found, default=0.0)

    def wanted(self, run: str) -> list[Interval]:
        """When a waiting request lacked memory in that run: disjoint, ascending."""
        waits = sorted(
            (turn.admit_s - turn.memory_wait_s, turn.admit_s)
            for log, turn in self.turns()
            if log.run == run and turn.admit_s is not None and turn.memory_wait_s
        )
        found: list[Interval] = []
        for start_s, end_s in waits:
            if found and start_s <= found[-1][1]:
                found[-1] = (found[-1][0], max(end_s, found[-1][1]))
            else:
                found.append((start_s, end_s))
        return found

    def turns(self) -> Iterator[tuple[ProgramLog, TurnLog]]:
        for program in self.programs:
            for turn in program.turns:
                yield program, turn

    def gaps_by_tool(self) -> dict[str, list[float]]:
        """Seconds between turns after each tool, the most frequent tool first."""
        gaps: dict[str, list[float]] = defaultdict(list)
        for _, turn in self.turns():
            if turn.next_gap_s is not None:
                tool = "(not known)" if turn.decided is None else turn.decided.tool
                gaps[tool].append(turn.next_gap_s)
        return dict(sorted(gaps.items(), key=lambda item: -len(item[1])))


def held_in_vain(pin: PinLog, wanted: Sequence[Interval]) -> list[Interval]:
    """When an unclaimed pin held what a waiting request lacked.

    wanted: as `Recording.wanted` gives it. A pin that still lives has none.
    """
    if pin.end_s is None or pin.outcome == "claimed":
        return []
    first = max(0, bisect_right(wanted, (pin.start_s, math.inf)) - 1)
    found = []
    for start_s, end_s in wanted[first:]:
        if start_s >= pin.end_s:
            break
        if end_s > pin.start_s:
            found.append((max(start_s, pin.start_s), min(end_s, pin.end_s)))
    return found


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
