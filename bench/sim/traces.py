"""Reads recorded agent programs (gzip JSON lines) as programs to replay.

One program a line: ``{"program_id", "turns": [{"new_prompt_tokens",
"output_tokens", "tool", "tool_s", "exe"?}]}``; other keys are ignored.
"""

from __future__ import annotations

import gzip
import json
import math
import statistics
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from bench.sim.workloads import SWE_BENCH, Program, Turn, poisson_arrivals

_MIN_PROMPT_TOKENS = 8
_MIN_OUTPUT_TOKENS = 4


class TraceError(ValueError):
    """A trace file that cannot be replayed; names file, line and field."""


@dataclass(frozen=True, slots=True)
class TraceScale:
    """How recorded programs are fitted to a small model and a short run."""

    mean_context_tokens: int = 4_000
    """The replayed programs' mean final context; one factor for all of them."""
    max_context_tokens: int = 12_000
    """Turns that would grow a program beyond this are dropped."""
    max_turns: int = 14
    """Later turns are dropped."""
    gap_cap_s: float = 10.0
    """Longest gap in seconds."""


def from_trace(
    path: Path,
    num_programs: int,
    rate: float,
    seed: int,
    scale: TraceScale | None = None,
    half: str = "",
) -> tuple[Program, ...]:
    """The first programs of a trace with two turns or more, scaled to the model.

    Arrivals are Poisson with ``rate`` per second, because most traces have none. An
    unknown tool time becomes the median of the file's known ones, or the mean of the
    paper's SWE-bench row when the file knows none.

    Args:
        half: "odd" or "even": only these lines, counted from 1; "": all.

    Raises:
        TraceError: unreadable file, bad line, or no usable program.
    """
    if num_programs < 1 or rate <= 0:
        raise ValueError(
            f"num_programs and rate must be positive, got {num_programs}, {rate:g}"
        )
    scale = scale or TraceScale()
    recorded = []
    first = {"": 0, "odd": 0, "even": 1}[half]
    for program in islice(_read(path), first, None, 2 if half else 1):
        if len(program.turns) >= 2:
            recorded.append(
                replace(program, turns=_end(program.turns[: scale.max_turns]))
            )
        if len(recorded) == num_programs:
            break
    if not recorded:
        raise TraceError(f"{path}: no program with at least two turns")
    mean_context = statistics.fmean(p.context_tokens for p in recorded)
    factor = min(1.0, scale.mean_context_tokens / mean_context)
    unknown_gap_s = _typical_gap_s(recorded)
    arrivals = poisson_arrivals(len(recorded), rate, seed)
    return tuple(
        Program(
            program.program_id,
            arrival_s,
            _fit(program.turns, factor, unknown_gap_s, scale),
        )
        for program, arrival_s in zip(recorded, arrivals, strict=True)
    )


def _fit(
    turns: Sequence[Turn], factor: float, unknown_gap_s: float, scale: TraceScale
) -> tuple[Turn, ...]:
    fitted: list[Turn] = []
    context = 0
    for turn in turns:
        prompt = max(_MIN_PROMPT_TOKENS, round(turn.new_prompt_tokens * factor))
        output = max(_MIN_OUTPUT_TOKENS, round(turn.output_tokens * factor))
        if not fitted:
            prompt = min(prompt, scale.max_context_tokens // 2)
            output = min(output, scale.max_context_tokens // 2)
        if context + prompt + output > scale.max_context_tokens:
            break
        context += prompt + output
        gap_s = unknown_gap_s if math.isnan(turn.gap_s) else turn.gap_s
        fitted.append(Turn(prompt, output, turn.tool, min(gap_s, scale.gap_cap_s)))
    return _end(fitted)


def _end(turns: Sequence[Turn]) -> tuple[Turn, ...]:
    """The turns with nothing after the last one."""
    return (*turns[:-1], replace(turns[-1], tool="", gap_s=0.0))


def _typical_gap_s(programs: Sequence[Program]) -> float:
    gaps = [turn.gap_s for program in programs for turn in program.turns[:-1]]
    known = [gap_s for gap_s in gaps if not math.isnan(gap_s)]
    return statistics.median(known) if known else SWE_BENCH.tool_s.mean


def _read(path: Path) -> Iterator[Program]:
    """Programs at full scale, one a line; unknown gaps are NaN."""
    for record, where in read_records(path):
        turns = tuple(
            _parse_turn(turn, f"{where}: turns[{index}]")
            for index, turn in enumerate(record["turns"])
        )
        yield Program(record["program_id"], 0.0, turns)


def read_records(path: Path) -> Iterator[tuple[dict[str, Any], str]]:
    """The raw programs of a trace, each with its "file:line" for error messages.

    Each has a unique "program_id" and a non-empty list of "turns", all objects.

    Raises:
        TraceError: unreadable file, or a line that is no such program.
    """
    seen: set[str] = set()
    try:
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    where = f"{path}:{number}"
                    record = _parse(line, where)
                    program_id = record["program_id"]
                    if program_id in seen:
                        raise TraceError(
                            f"{where}: program_id {program_id!r} occurs twice"
                        )
                    seen.add(program_id)
                    yield record, where
    except FileNotFoundError:
        raise TraceError(f"{path}: no such file") from None
    except (gzip.BadGzipFile, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: not gzip JSON lines: {error}") from error


def _parse(line: str, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise TraceError(f"{where}: not JSON: {error}") from error
    if not isinstance(record, dict):
        raise TraceError(f"{where}: expected an object, got {type(record).__name__}")
    program_id = record.get("program_id")
    if not isinstance(program_id, str) or not program_id:
        raise TraceError(f"{where}: program_id must be a string, got {program_id!r}")
    turns = record.get("turns")
    if not isinstance(turns, list) or not turns:
        raise TraceError(f"{where}: turns must be a non-empty list")
    for index, turn in enumerate(turns):
        if not isinstance(turn, dict):
            raise TraceError(
                f"{where}: turns[{index}]: expected an object, "
                f"got {type(turn).__name__}"
            )
    return record


def _parse_turn(turn: dict[str, Any], where: str) -> Turn:
    tool = turn.get("tool") or ""
    # For shell agents the executable predicts the gap, "bash" does not.
    name = turn.get("exe") if tool == "bash" else tool
    return Turn(
        count(turn, "new_prompt_tokens", where),
        count(turn, "output_tokens", where),
        str(name or tool),
        seconds(turn, "tool_s", where),
    )


def seconds(record: dict[str, Any], key: str, where: str) -> float:
    """A field in seconds, >= 0; NaN where it is null or absent."""
    value = record.get(key)
    if value is None:
        return math.nan
    if not _is_number(value) or not 0.0 <= value < math.inf:
        raise TraceError(f"{where}: {key} must be seconds >= 0, got {value!r}")
    return float(value)


def count(turn: dict[str, Any], key: str, where: str) -> int:
    """A whole number >= 0."""
    value = turn.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise TraceError(f"{where}: {key} must be an integer >= 0, got {value!r}")
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
