"""Trajectories in ATIF, Harbor's interchange format: DeepSWE's, Terminal-Bench's.

The time of an agent's step is that of its answer. Where others have metrics, a step
without belongs to the answer before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ttlcache.toolcalls import key_for_tool
from ttlcache_sim.load.readers import model_calls
from ttlcache_sim.load.traces import Log, LogPart, Moment, Reader, RecordedProgram


class _Tool(LogPart):
    function_name: str
    arguments: dict[str, Any] | str | None = None


class _Step(LogPart):
    source: str
    timestamp: Moment | None = None
    message: Any = None
    reasoning_content: str | None = None
    tool_calls: list[_Tool] | None = None
    observation: Any = None
    metrics: model_calls.Usage | None = None


class _Trajectory(LogPart):
    session_id: str | None = None
    steps: list[_Step]


def _recognises(log: Log) -> bool:
    return str(log.first.get("schema_version", "")).startswith("ATIF")


def _read(log: Log) -> Iterator[RecordedProgram]:
    for record in log.records:
        trajectory = record.read(_Trajectory)
        name = trajectory.session_id or log.path.stem
        yield from model_calls.programs_of(name, _calls(trajectory.steps))


def _calls(steps: list[_Step]) -> list[model_calls.Call]:
    transcript, number = model_calls.Transcript(), 0
    has_metrics = any(step.metrics and step.metrics.whole_prompt for step in steps)
    for step in steps:
        if step.source != "agent":
            transcript.add_input(step.message)
            continue
        number += not has_metrics or bool(step.metrics and step.metrics.whole_prompt)
        made = step.tool_calls or []
        transcript.add_answer(
            *(step.message, step.reasoning_content, [tool.arguments for tool in made]),
            tools=[key_for_tool(tool.function_name, tool.arguments) for tool in made],
            name=str(number),
            usage=step.metrics,
            at_s=step.timestamp,
        )
        transcript.add_input(step.observation)
    return transcript.calls


READER = Reader("ATIF", _recognises, _read)
