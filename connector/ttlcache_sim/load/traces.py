"""Recorded agent programs, and the logs that readers make them of.

A trace is JSON lines, each a `RecordedProgram`; other keys are ignored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


Tokens = Annotated[int, Field(ge=0, strict=True), BeforeValidator(_whole)]
#: None where it is not known.
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False, strict=True)] | None

#: Seconds a generated token where a log has no latency: 50 tokens a second.
DECODE_S_PER_TOKEN = 0.02
#: Larger times are in milliseconds, microseconds or nanoseconds.
_MAX_S = 1e11

_Model = TypeVar("_Model", bound=BaseModel)


class TraceError(ValueError):
    """A log that cannot be replayed; names file, line and field."""


class RecordedTurn(BaseModel):
    """One request, and the gap after it.

    new_prompt_tokens: added to the context since the previous turn's output.
    tool, tool_s: what ran in the gap, and how long. exe: of a shell call, the program.
    start_s: when the request was sent.
    shared_tokens: of a first prompt, those at its head that others begin with, too.
    estimated: of "tokens" and "tool_s", what a reader did not find but guess; "context"
        where the prompt was shorter than the context before it.
    """

    model_config = ConfigDict(frozen=True)

    new_prompt_tokens: Tokens
    output_tokens: Tokens
    tool: str | None = None
    exe: str | None = None
    tool_s: Seconds = None
    start_s: Seconds = None
    shared_tokens: Tokens = 0
    estimated: tuple[str, ...] = ()


class RecordedProgram(BaseModel):
    """An agent's whole job. arrival_s: when its first request was sent.

    part: from 2 on it goes on after a compaction; what follows is of the first part.
    opening: how the first prompt begins, "" where a log has no texts. cached_tokens: of
        the first prompt, what the server's cache had; None where the log does not say.
    unlogged_tokens: of the first prompt, what its text in the log does not have: system
        prompt and tools; None where the log has all of it, or no count.
    """

    model_config = ConfigDict(frozen=True)

    program_id: str = Field(min_length=1)
    turns: list[RecordedTurn] = Field(min_length=1)
    arrival_s: Seconds = None
    part: int = Field(default=1, exclude=True)
    opening: str = Field(default="", exclude=True, repr=False)
    cached_tokens: Tokens | None = Field(default=None, exclude=True)
    unlogged_tokens: Tokens | None = Field(default=None, exclude=True)


def _to_seconds(value: Any) -> float:
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return datetime.fromisoformat(value.replace(" UTC", "+00:00")).timestamp()
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("expected a time: ISO 8601, or seconds since 1970")
    if not math.isfinite(value):
        raise ValueError("expected a time, not infinity")
    while value > _MAX_S:
        value /= 1000
    return float(value)


class LogPart(BaseModel):
    """Fields of a log; null is what is not there."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        return {name: each for name, each in value.items() if each is not None}


#: Seconds since 1970, from ISO 8601 or a number of seconds or of a smaller unit.
Moment = Annotated[float, BeforeValidator(_to_seconds)]


@dataclass(frozen=True, slots=True)
class Record:
    """One JSON object of a log. where: its file and line, for errors."""

    where: str
    data: dict[str, Any]

    def read(self, model: type[_Model]) -> _Model:
        """The fields that `model` has; others are ignored.

        Raises:
            TraceError: naming file, line and field.
        """
        try:
            return model.model_validate(self.data)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(map(str, first["loc"]))
            is_missing = first["type"] == "missing"
            found = "" if is_missing else f", got {repr(first['input'])[:80]}"
            raise TraceError(f"{self.where}: {field}: {first['msg']}{found}") from None


@dataclass(frozen=True, slots=True)
class Log:
    """One file, or the event files of one conversation.

    records: of JSON. lines: of any other text. problem: why what begins like JSON is
    none.
    """

    path: Path
    records: Sequence[Record] = ()
    lines: Sequence[str] = ()
    problem: str = ""

    @property
    def first(self) -> Mapping[str, Any]:
        return self.records[0].data if self.records else {}


@dataclass(frozen=True, slots=True)
class Reader:
    """One format. recognises: by what the log holds, whatever its name is."""

    name: str
    recognises: Callable[[Log], bool]
    read: Callable[[Log], Iterable[RecordedProgram]]
