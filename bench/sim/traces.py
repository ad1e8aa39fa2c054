"""Reads recorded agent programs (gzip JSON lines).

One program a line: ``{"program_id", "turns": [{"new_prompt_tokens",
"output_tokens", "tool", "tool_s", "exe"?}]}``; other keys are ignored.
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class TraceError(ValueError):
    """A trace file that cannot be replayed; names file, line and field."""


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
