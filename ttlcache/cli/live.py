"""What a live server answers, checked before it is used, and why it does not."""

from __future__ import annotations

from typing import Any

import httpx
from pydantic import BaseModel, ValidationError


class _Row(BaseModel):
    program: str
    turns: int
    running: int
    tool: str
    gap_s: float | None
    pins: int
    pinned_blocks: int
    ttl_left_s: float | None


class _Engine(BaseModel):
    programs: list[_Row] = []
    gauges: dict[str, float] = {}
    totals: dict[str, float] = {}
    settings: dict[str, Any] = {}


class _Answer(BaseModel):
    engines: list[_Engine]


def reason(error: Exception) -> str:
    """Why a server was not reached, in our own words; httpx raised `error`."""
    if isinstance(error, httpx.InvalidURL | httpx.UnsupportedProtocol):
        return "this is no address; expected: http://HOST:PORT"
    if isinstance(error, httpx.ConnectError):
        if "[SSL" in str(error):  # httpx has no error of its own for it
            return f"something answers, but not by TLS that is trusted here: {error}"
        return "no server answers at this address; is vLLM up, and on this port?"
    return "no answer in time, or the connection broke; see the server's log"


def engines_of(answer: httpx.Response) -> list[dict[str, Any]]:
    """The engines that the answer tells of.

    Raises:
        ValueError: it is no answer of ours; the text says where it differs.
    """
    try:
        _Answer.model_validate_json(answer.content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "the whole answer"
        raise ValueError(
            f"{answer.url} is not ttlcache's: {place} is not what it should be; it "
            f"begins {answer.text[:60]!r}"
        ) from None
    engines: list[dict[str, Any]] = answer.json()["engines"]
    return engines
