"""Recorded agent programs: what every reader of logs makes, and our own trace format.

A trace is JSON lines, each a `RecordedProgram`; other keys are ignored.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Tokens = Annotated[int, Field(ge=0, strict=True)]
#: None where it is not known.
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False, strict=True)] | None

#: Seconds a generated token where a log has no latency: 50 tokens a second.
DECODE_S_PER_TOKEN = 0.02


class TraceError(ValueError):
    """A log that cannot be replayed; names file, line and field."""


class RecordedTurn(BaseModel):
    """One request, and the gap after it.

    new_prompt_tokens: added to the context since the previous turn's output.
    tool, tool_s: what ran in the gap, and how long. exe, eff: of a shell call, the
        executable and the whole command, paths and arguments masked.
    start_s: when the request was sent. llm_s: from there to the end of its output.
    estimated: of "tokens" and "tool_s", what a reader did not find but guess.
    """

    model_config = ConfigDict(frozen=True)

    new_prompt_tokens: Tokens
    output_tokens: Tokens
    tool: str | None = None
    exe: str | None = None
    eff: str | None = None
    tool_s: Seconds = None
    llm_s: Seconds = None
    start_s: Seconds = None
    estimated: tuple[str, ...] = ()


class RecordedProgram(BaseModel):
    """An agent's whole job. arrival_s: when its first request was sent."""

    model_config = ConfigDict(frozen=True)

    program_id: str = Field(min_length=1)
    turns: list[RecordedTurn] = Field(min_length=1)
    arrival_s: Seconds = None
