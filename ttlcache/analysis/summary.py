"""What a recording amounts to: completion times, hits, waits, pins, tools."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ttlcache.analysis.recording import (
    Interval,
    ProgramLog,
    Recording,
    held_in_vain,
)


@dataclass(frozen=True, slots=True)
class Spread:
    """Statistics of one quantity; all 0 where there is none."""

    count: int = 0
    mean: float = 0.0
    p50: float = 0.0
    p95: float = 0.0
    max: float = 0.0

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Percentiles interpolate linearly between order statistics."""
        if not values:
            return cls()
        numbers = np.asarray(values, dtype=np.float64)
        p50, p95 = (float(p) for p in np.percentile(numbers, (50, 95)))
        return cls(len(values), float(numbers.mean()), p50, p95, float(numbers.max()))


@dataclass(frozen=True, slots=True)
class Summary:
    """A recording in numbers; seconds and tokens.

    jct: job completion time of programs with a completed turn, last departure minus
        first arrival; of `under_way` programs no end was seen. makespan_s: in which
        runs had programs, from the first arrival to the last departure.
    claims: of pins. claimed_tokens: served from them. saved_tokens, saved_s: of those,
        what plain vLLM's prefix cache would have evicted, and the prefill that this
        spared. savable_tokens, savable_s: the same under policy `observe`, where
        pins would have saved it.
    wasted_block_s: blocks times seconds of pins that nobody claimed, while a request
        lacked memory. idle_block_s: while none did.
    gaps: seconds between turns, by tool where the recording knows it.
    """

    programs: int
    under_way: int
    turns: int
    jct: Spread
    makespan_s: float
    prompt_tokens: int
    cached_tokens: int
    claims: int
    claimed_tokens: int
    saved_tokens: int
    saved_s: float
    savable_tokens: int
    savable_s: float
    wasted_block_s: float
    idle_block_s: float
    wait: Spread
    pin: Spread
    outcomes: dict[str, int]
    preemptions: int
    rules: dict[str, int]
    gaps: dict[str, Spread]


def summarize(recording: Recording) -> Summary:
    """Every number of `Summary`, each program and turn counted once."""
    turns = [turn for _, turn in recording.turns()]
    observed = recording.observed_runs
    real = [turn for log, turn in recording.turns() if log.run not in observed]
    would_be = [turn for log, turn in recording.turns() if log.run in observed]
    pins = [turn.pin for turn in turns if turn.pin is not None]
    ended = [pin for pin in pins if pin.end_s is not None]
    prompt = sum(turn.prompt_tokens for turn in turns if turn.wait_s is not None)
    cached = sum(turn.cached_tokens for turn in turns)
    by_run: dict[str, list[ProgramLog]] = {}
    for log in recording.programs:
        by_run.setdefault(log.run, []).append(log)
    wasted_block_s, unclaimed_block_s = _unclaimed(recording)
    jcts = [s for log in recording.programs if (s := log.jct_s) is not None]
    return Summary(
        programs=len(recording.programs),
        under_way=sum(not log.how for log in recording.programs),
        turns=len(turns),
        jct=Spread.of(jcts),
        makespan_s=_covered_s(sorted(filter(None, map(_span, by_run.values())))),
        prompt_tokens=prompt,
        cached_tokens=cached,
        claims=sum(turn.claimed_pin is not None for turn in turns),
        claimed_tokens=sum(turn.claimed_tokens for turn in real),
        saved_tokens=sum(turn.saved_tokens for turn in real),
        saved_s=sum(turn.saved_s for turn in real),
        savable_tokens=sum(turn.saved_tokens for turn in would_be),
        savable_s=sum(turn.saved_s for turn in would_be),
        wasted_block_s=wasted_block_s,
        idle_block_s=unclaimed_block_s - wasted_block_s,
        wait=Spread.of([turn.wait_s for turn in turns if turn.wait_s is not None]),
        pin=Spread.of([pin.lived_s for pin in ended]),
        outcomes=dict(Counter(t.pin_outcome or "still held" for t in turns if t.pin)),
        preemptions=sum(turn.preemptions for turn in turns),
        rules=dict(Counter(turn.rule for turn in turns if turn.rule)),
        gaps={tool: Spread.of(s) for tool, s in recording.gaps_by_tool().items()},
    )


def _span(logs: Sequence[ProgramLog]) -> Interval | None:
    """Of one run, None where no program of it has completed a turn."""
    departures = [end_s for log in logs if (end_s := log.depart_s) is not None]
    return (min(log.arrive_s for log in logs), max(departures)) if departures else None


def _covered_s(spans: Sequence[Interval]) -> float:
    """Several ranks may have run side by side."""
    covered_s, until_s = 0.0, -math.inf
    for start_s, end_s in spans:
        covered_s += max(0.0, end_s - max(start_s, until_s))
        until_s = max(until_s, end_s)
    return covered_s


def _unclaimed(recording: Recording) -> tuple[float, float]:
    """Block-seconds of unclaimed pins: while a request lacked memory, and in all."""
    wanted = {run: recording.wanted(run) for run in recording.runs}
    wasted, held = 0.0, 0.0
    for log, turn in recording.turns():
        pin = turn.pin
        if pin is not None and pin.outcome != "claimed":
            held += pin.kv_blocks * pin.lived_s
            in_vain = held_in_vain(pin, wanted.get(log.run, []))
            wasted += pin.kv_blocks * sum(end - start for start, end in in_vain)
    return wasted, held
