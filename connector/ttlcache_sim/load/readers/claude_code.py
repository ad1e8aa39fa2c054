"""Claude Code's session files: ~/.claude/projects/PROJECT/SESSION.jsonl.

An answer has a line for each of its blocks, with the same message id; only a line with
a stop reason is sure to have its output tokens. A sub-agent is a program of its own, in
a file of its own or between the lines of the session.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ttlcache_sim.load.readers import model_calls
from ttlcache_sim.load.traces import Log, LogPart, Moment, Reader, RecordedProgram


class _Message(LogPart):
    id: str | None = None
    content: Any = None
    stop_reason: str | None = None
    usage: model_calls.Usage | None = None


class _Line(LogPart):
    type: str
    timestamp: Moment
    message: _Message
    uuid: str = ""
    parentUuid: str | None = None
    sessionId: str = "session"
    isSidechain: bool = False
    agentId: str | None = None


def _recognises(log: Log) -> bool:
    return any(
        "sessionId" in record.data and isinstance(record.data.get("message"), dict)
        for record in log.records[:200]
    )


def _read(log: Log) -> Iterator[RecordedProgram]:
    transcripts: dict[str, model_calls.Transcript] = {}
    roots: dict[str, str] = {}  # of lines, for side chains without an agent's id
    for record in log.records:
        if record.data.get("type") not in ("user", "assistant"):
            continue
        line = record.read(_Line)
        root = roots[line.uuid] = roots.get(line.parentUuid or "", line.uuid)
        agent = f"/{line.agentId or root}" if line.isSidechain else ""
        name = line.sessionId + agent
        _add(line, transcripts.setdefault(name, model_calls.Transcript()))
    for name, transcript in transcripts.items():
        yield from model_calls.programs_of(name, transcript.calls)


def _add(line: _Line, transcript: model_calls.Transcript) -> None:
    message, usage = line.message, line.message.usage
    if line.type == "user":
        transcript.add_input(message.content, at_s=line.timestamp)
    elif usage and usage.whole_prompt:  # what an error stands for has none
        if message.stop_reason is None:
            usage = usage.model_copy(update={"output_tokens": None})
        transcript.add_answer(
            message.content,
            tools=model_calls.tools_in(message.content),
            name=message.id or line.uuid,
            usage=usage,
            at_s=line.timestamp,
        )


READER = Reader("Claude Code", _recognises, _read)
