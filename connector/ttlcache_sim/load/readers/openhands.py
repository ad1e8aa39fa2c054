"""OpenHands' event logs: a trajectory, the events of a conversation's folder, or a line
of an evaluation's output.jsonl with its `history`.

Both kinds: `ActionEvent` and `ObservationEvent`, and `action` and `observation` of
earlier versions. Events with the same response id are one answer. Token counts are in
the answer itself, or in base_state.json beside the folder of the events.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import Field

from ttlcache.toolcalls import key_for_tool
from ttlcache.types import GapKey
from ttlcache_sim.load.readers import model_calls
from ttlcache_sim.load.traces import (
    Log,
    LogPart,
    Moment,
    Reader,
    Record,
    RecordedProgram,
)

#: Actions that no model wrote.
_OWN = ("system", "recall", "change_agent_state", "null")
#: What the model reads or wrote; of earlier versions, an observation is a mere name.
_TEXT = ("args", "content", "thought", "tool_call", "tools", "system_prompt")


class _Event(LogPart):
    timestamp: Moment | None = None
    source: str | None = None
    kind: str | None = None
    action: Any = None
    args: Any = None
    tool_name: str | None = None
    llm_response_id: str | None = None
    tool_call_metadata: dict[str, Any] = Field(default_factory=dict)

    @property
    def is_answer(self) -> bool:
        if self.kind is None:
            own = not isinstance(self.action, str) or self.action in _OWN
            return self.source == "agent" and not own
        return self.kind == "ActionEvent" or (
            self.kind == "MessageEvent" and self.source == "agent"
        )

    @property
    def tools(self) -> Sequence[GapKey]:
        if isinstance(self.action, dict):
            return [key_for_tool(self.tool_name or "", self.action)]
        if self.kind or self.action == "message":
            return []
        name = self.tool_call_metadata.get("function_name", self.action)
        return [key_for_tool("bash" if self.action == "run" else name, self.args)]


def _is_event(data: Mapping[str, Any]) -> bool:
    is_new = str(data.get("kind", "")).endswith("Event")
    return "source" in data and (is_new or "action" in data or "observation" in data)


def _recognises(log: Log) -> bool:
    return any(_is_event(event.data) for event in _events(log.records[:20]))


def _events(records: Sequence[Record]) -> Iterator[Record]:
    """With those of a `history` in place of the line that has it."""
    for record in records:
        inner = record.data.get("history")
        for item in inner if isinstance(inner, list) else [record.data]:
            if isinstance(item, dict) and _is_event(item):
                yield Record(record.where, item)


def _read(log: Log) -> Iterator[RecordedProgram]:
    whole = [record for record in log.records if "history" in record.data]
    for record in whole:
        name = str(record.data.get("instance_id", log.path.stem))
        yield from model_calls.programs_of(name, _calls([record]))
    if not whole:
        yield from model_calls.programs_of(log.path.stem, _calls(log.records))


def _calls(records: Sequence[Record]) -> list[model_calls.Call]:
    usages = {
        found["response_id"]: found
        for record in records
        for found in _usages(record.data.get("stats"))
    }
    transcript = model_calls.Transcript()
    for number, record in enumerate(_events(records)):
        event, data = record.read(_Event), record.data
        texts = [data.get(name) for name in (*_TEXT, "llm_message")]
        if not event.is_answer:
            seen = data.get("observation") if event.kind else None
            transcript.add_input(texts, seen, at_s=event.timestamp)
            continue
        response = event.tool_call_metadata.get("model_response") or {}
        name = event.llm_response_id or response.get("id") or str(number)
        usage = usages.get(name, response.get("usage")) or {}
        transcript.add_answer(
            texts,
            tools=event.tools,
            name=name,
            usage=Record(record.where, usage).read(model_calls.Usage),
            at_s=event.timestamp,
        )
    return transcript.calls


def _usages(value: Any) -> Iterator[dict[str, Any]]:
    """The usage of every response, wherever in the statistics it stands."""
    if isinstance(value, dict):
        if value.get("response_id") and "prompt_tokens" in value:
            yield value
        value = list(value.values())
    for item in value if isinstance(value, list) else ():
        yield from _usages(item)


READER = Reader("OpenHands", _recognises, _read)
