"""Logs of requests in the form of OpenAI's or Anthropic's API, as proxies write them.

JSON lines, each one request: its body in the line itself or under `request`, `body` or
`kwargs`, the answer under `response` or `output`. `input` may be the prompt's text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import AliasChoices, BaseModel, Field

from ttlcache.toolcalls import detect
from ttlcache.types import GapKey
from ttlcache_sim.load.readers import base
from ttlcache_sim.load.readers.base import Request, conversations
from ttlcache_sim.load.traces import (
    Log,
    Moment,
    Reader,
    Record,
    RecordedProgram,
    TraceError,
)

_BODIES = ("request", "body", "kwargs")
_PROMPTS = ("messages", "input", "prompt")
_HEAD = ("system", "instructions", "tools")
_STARTS = ("start_time", "startTime", "timestamp", "time", "ts", "created_at")
_ENDS = ("end_time", "endTime", "completed_at")
_SESSIONS = ("session_id", "conversation_id", "user")
#: It moves from message to message, and no token comes of it.
_CACHE_MARK = re.compile(r'"cache_control": (\{[^}]*\}|null)(, )?')


class _Line(BaseModel):
    start_s: Moment | None = Field(
        default=None, validation_alias=AliasChoices(*_STARTS)
    )
    end_s: Moment | None = Field(default=None, validation_alias=AliasChoices(*_ENDS))
    session: str | None = Field(default=None, validation_alias=AliasChoices(*_SESSIONS))


class _Answer(BaseModel):
    usage: base.Usage = base.Usage()


def _body(data: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = (data[name] for name in _BODIES if isinstance(data.get(name), dict))
    return next(inner, data)


def _recognises(log: Log) -> bool:
    body = _body(log.first)
    return any(isinstance(body.get(name), list | str) for name in _PROMPTS)


def _read(log: Log) -> Iterator[RecordedProgram]:
    requests = [_request(each) for each in log.records if not _is_empty(each)]
    yield from conversations(requests, log.path.stem)


def _is_empty(record: Record) -> bool:
    """Of a call that failed, proxies log a prompt without text."""
    body = _body(record.data)
    told = [body[name] for name in _PROMPTS if name in body]
    return bool(told) and not any(told)


def _request(record: Record) -> Request:
    line, body = record.read(_Line), _body(record.data)
    answer = record.data.get("response")
    answer = answer if isinstance(answer, dict) else record.data
    text = answer.get("choices") or answer.get("output") or answer.get("content")
    return Request(
        _prompt(record, body),
        Record(record.where, answer).read(_Answer).usage,
        text,
        _tools(text) if text else None,
        line.start_s,
        line.end_s,
        line.session or str(body.get("user") or ""),
    )


def _tools(text: Any) -> Sequence[GapKey]:
    if not isinstance(text, str):
        return base.tools_in(text)
    found = detect(text)
    return [found] if found else []


def _prompt(record: Record, body: Mapping[str, Any]) -> str:
    """The prompt's text, what stays the same between turns first."""
    told = next((body[name] for name in _PROMPTS if body.get(name)), None)
    if not isinstance(told, list | str):
        fields = " or ".join(_PROMPTS)
        raise TraceError(f"{record.where}: {fields}: expected a text or messages")
    parts = [body[name] for name in _HEAD if name in body]
    parts += [told] if isinstance(told, str) else told
    return "\n".join(map(_text, parts))


def _text(part: Any) -> str:
    if isinstance(part, str):
        return part
    return _CACHE_MARK.sub("", json.dumps(part, sort_keys=True))


READER = Reader("request log", _recognises, _read)
