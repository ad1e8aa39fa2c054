"""Traces of kv-cache-tester: requests with token counts, no names of tools.

`t` is when a request was sent, `api_time` how long its answer took; early files lack
the latter. A sub-agent's requests are nested, and its times are its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import Field

from ttlcache.types import GapKey
from ttlcache_sim.load.readers import model_calls
from ttlcache_sim.load.traces import (
    Log,
    LogPart,
    Reader,
    Record,
    RecordedProgram,
    Seconds,
    Tokens,
)

#: Of every call: the files do not say which one it was.
_TOOL = GapKey("tool")


class _Request(LogPart):
    t: float
    prompt_tokens: Tokens = Field(validation_alias="in")
    output_tokens: Tokens = Field(validation_alias="out")
    stop: str = ""
    input_types: Sequence[str] = ()
    api_time: Seconds = None


class _Trace(LogPart):
    id: str | None = None
    requests: list[dict[str, Any]]


def _recognises(log: Log) -> bool:
    return {"block_size", "requests"} <= log.first.keys()


def _read(log: Log) -> Iterator[RecordedProgram]:
    for record in log.records:
        yield from _programs(record, log.path.stem)


def _programs(record: Record, name: str) -> Iterator[RecordedProgram]:
    trace = record.read(_Trace)
    name = trace.id or name
    requests: list[_Request] = []
    for number, data in enumerate(trace.requests):
        inner = Record(f"{record.where}: requests.{number}", data)
        if data.get("type") == "subagent":
            yield from _programs(inner, f"{name}/{data.get('agent_id', number)}")
        else:
            requests.append(inner.read(_Request))
    calls = []
    for index, each in enumerate(requests):
        following = requests[index + 1].input_types if index + 1 < len(requests) else []
        has_ended = each.stop == "end_turn" or following == ["text"]
        end_s = None if each.api_time is None else each.t + each.api_time
        tools = [] if has_ended else [_TOOL]
        calls.append(
            model_calls.Call(
                each.prompt_tokens, each.output_tokens, each.t, end_s, tools
            )
        )
    yield from model_calls.programs_of(name, calls)


READER = Reader("kv-cache-tester", _recognises, _read)
