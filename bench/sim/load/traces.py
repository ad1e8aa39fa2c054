"""Recorded agent programs: gzip JSON lines, each a `RecordedProgram`; other keys are
ignored."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

Tokens = Annotated[int, Field(ge=0)]
#: None where it is not known.
Seconds = Annotated[float | None, Field(ge=0, allow_inf_nan=False)]


class TraceError(ValueError):
    """A trace file that cannot be replayed; names file, line and field."""


class RecordedTurn(BaseModel):
    """One request, and the gap after it.

    new_prompt_tokens: added to the context since the previous turn's output.
    tool, tool_s: what ran in the gap, and how long. exe, eff: of a shell call, the
        executable and the whole command, paths and arguments masked.
    start_s: when the request was sent. llm_s: from there to the end of its output.
    """

    model_config = ConfigDict(strict=True, frozen=True)

    new_prompt_tokens: Tokens
    output_tokens: Tokens
    tool: str | None = None
    exe: str | None = None
    eff: str | None = None
    tool_s: Seconds = None
    llm_s: Seconds = None
    start_s: Seconds = None


class RecordedProgram(BaseModel):
    """An agent's whole job. arrival_s: when its first request was sent."""

    model_config = ConfigDict(strict=True, frozen=True)

    program_id: str = Field(min_length=1)
    turns: list[RecordedTurn] = Field(min_length=1)
    arrival_s: Seconds = None


def read_programs(path: Path) -> Iterator[RecordedProgram]:
    """The programs of a trace, each with an id of its own.

    Raises:
        TraceError: unreadable file, or a line that is no such program.
    """
    seen: set[str] = set()
    try:
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    program = _parse(line, f"{path}:{number}")
                    if program.program_id in seen:
                        raise TraceError(
                            f"{path}:{number}: program_id {program.program_id!r} "
                            "occurs twice"
                        )
                    seen.add(program.program_id)
                    yield program
    except FileNotFoundError:
        raise TraceError(f"{path}: no such file") from None
    except (gzip.BadGzipFile, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: not gzip JSON lines: {error}") from error


def _parse(line: str, where: str) -> RecordedProgram:
    try:
        return RecordedProgram.model_validate_json(line)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        found = "" if first["type"] == "json_invalid" else f", got {first['input']!r}"
        raise TraceError(f"{where}: {field}: {first['msg']}{found}") from None
