"""Codex's rollout files: ~/.codex/sessions/YEAR/MONTH/DAY/rollout-….jsonl.

The items of an answer are followed by a `token_count` with its usage. In files without
any an answer ends at the next input.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ttlcache_sim.load.readers import model_calls
from ttlcache_sim.load.traces import Log, LogPart, Moment, Reader, RecordedProgram

_ANSWERS = ("reasoning", "function_call", "custom_tool_call", "local_shell_call")
_TEXT = ("content", "summary", "arguments", "input", "output", "action")


class _Info(LogPart):
    last_token_usage: model_calls.Usage | None = None
    total_token_usage: Any = None


class _Payload(LogPart):
    type: str | None = None
    role: str | None = None
    info: _Info | None = None


class _Line(LogPart):
    timestamp: Moment
    type: str
    payload: _Payload


def _recognises(log: Log) -> bool:
    kinds = ("session_meta", "response_item")
    return any(record.data.get("type") in kinds for record in log.records[:20])


def _read(log: Log) -> Iterator[RecordedProgram]:
    meta = log.first.get("payload")
    name = meta.get("id") if isinstance(meta, dict) else None
    items = [
        (record.read(_Line), record.data["payload"])
        for record in log.records
        if record.data.get("type") in ("response_item", "event_msg")
    ]
    yield from model_calls.programs_of(str(name or log.path.stem), _calls(items))


def _calls(items: list[tuple[_Line, dict[str, Any]]]) -> list[model_calls.Call]:
    transcript, number, total = model_calls.Transcript(), 0, None
    infos = [line.payload.info for line, _ in items]
    has_usage = any(info and info.last_token_usage for info in infos)
    for line, body in items:
        payload, info = line.payload, line.payload.info
        name, text = str(number), [body.get(field) for field in _TEXT]
        if line.type == "event_msg":
            usage = info.last_token_usage if info else None
            # Where the total has not moved it is told again.
            again = total is not None and info and info.total_token_usage == total
            if info and usage and transcript.calls and not again:
                total, end_s = info.total_token_usage, transcript.calls[-1].end_s
                transcript.add_answer(name=name, usage=usage, at_s=end_s)
                number += 1
        elif payload.type in _ANSWERS or payload.role == "assistant":
            tools = model_calls.tools_in(body)
            transcript.add_answer(text, tools=tools, name=name, at_s=line.timestamp)
        else:
            transcript.add_input(text, at_s=line.timestamp)
            number += not has_usage
    # An answer that was broken off has no count.
    return [call for call in transcript.calls if call.is_counted or not has_usage]


READER = Reader("Codex", _recognises, _read)
