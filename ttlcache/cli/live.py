"""What a live server answers at `/ttlcache/programs`, checked before it is used."""

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


class _Answer(BaseModel):
    engines: list[_Engine]


def engines_of(answer: httpx.Response) -> list[dict[str, Any]]:
    """The engines that the answer tells of.

    Raises:
        ValueError: it is no answer of ours; the text says where it differs.
    """
    try:
        _Answer.model_validate_json(answer.content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "it"
        text = f"{answer.url} is not ttlcache's: {place}: {first['msg']}"
        raise ValueError(f"{text}; it begins {answer.text[:60]!r}") from None
    engines: list[dict[str, Any]] = answer.json()["engines"]
    return engines
