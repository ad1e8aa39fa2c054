"""Logs of requests in the form of OpenAI's or Anthropic's API, as proxies write them.

JSON lines, each one request: its body in the line itself or under `request`, `body` or
`kwargs`, the answer under `response` or `output`. `input` may be the prompt's text, and
all of them JSON as text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

from pydantic import AliasChoices, BeforeValidator, Field

from ttlcache.toolcalls import detect
from ttlcache.types import GapKey
from ttlcache_sim.load.readers import model_calls
from ttlcache_sim.load.readers.model_calls import Request, conversations
from ttlcache_sim.load.traces import (
    Log,
    LogPart,
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
_MS = ("latency_ms", "duration_ms", "response_time_ms")
#: What LiteLLM writes in place of texts.
_REDACTED = "redacted-by-litellm"
#: It moves from message to message, and no token comes of it.
_CACHE_MARK = re.compile(r'"cache_control": (\{[^}]*\}|null)(, )?')


class _Line(LogPart):
    start_s: Moment | None = Field(
        default=None, validation_alias=AliasChoices(*_STARTS)
    )
    end_s: Moment | None = Field(default=None, validation_alias=AliasChoices(*_ENDS))
    session: Annotated[str, BeforeValidator(str)] = Field(
        default="", validation_alias=AliasChoices(*_SESSIONS)
    )
    answer_ms: Any = Field(default=None, validation_alias=AliasChoices(*_MS))

    @property
    def answered_s(self) -> float | None:
        is_told = isinstance(self.answer_ms, int | float)
        if self.end_s is not None or self.start_s is None or not is_told:
            return self.end_s
        return self.start_s + float(self.answer_ms) / 1000


def _body(data: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = (_unpacked(data.get(name)) for name in _BODIES)
    return next((body for body in inner if isinstance(body, dict)), data)


def _unpacked(value: Any, begin: str = "{") -> Any:
    """JSON that is written as a text, as databases have it."""
    if not isinstance(value, str) or not value.startswith(begin):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def _recognises(log: Log) -> bool:
    body = _body(log.first)
    return any(isinstance(body.get(name), list | str) for name in _PROMPTS)


def _read(log: Log) -> Iterator[RecordedProgram]:
    requests = [_request(each) for each in log.records if _is_chat(each)]
    yield from conversations(requests, log.path.stem)


def _is_chat(record: Record) -> bool:
    """No embedding, nor a call that failed: proxies log it without text."""
    body, answer = _body(record.data), _unpacked(record.data.get("response"))
    told = [body[name] for name in _PROMPTS if name in body]
    if isinstance(answer, dict) and answer.get("object") == "list":
        return False
    return not told or any(told)


def _request(record: Record) -> Request:
    line, body = record.read(_Line), _body(record.data)
    told = _unpacked(record.data.get("response"))
    answer = told if isinstance(told, dict) else record.data
    usage = answer.get("usage")
    counts = {**record.data, **(usage if isinstance(usage, dict) else {})}
    text = answer.get("choices") or answer.get("output") or answer.get("content")
    text = text or (told if isinstance(told, str) else None)
    return Request(
        _prompt(record, body),
        Record(record.where, counts).read(model_calls.Usage),
        text,
        _tools(text) if text else None,
        line.start_s,
        line.answered_s,
        line.session or str(body.get("user") or ""),
        str(answer.get("id") or ""),
        str(body.get("previous_response_id") or ""),
    )


def _tools(text: Any) -> Sequence[GapKey]:
    if not isinstance(text, str):
        return model_calls.tools_in(text)
    found = detect(text)
    return [found] if found else []


def _prompt(record: Record, body: Mapping[str, Any]) -> str:
    """The prompt's text, what stays the same between turns first."""
    told = next((body[name] for name in _PROMPTS if body.get(name)), None)
    told = _unpacked(told, "[")
    if next(model_calls.texts_in(told), "") == _REDACTED:
        raise TraceError(f"{record.where}: LiteLLM has left the texts out of its log")
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
