"""SWE-agent's trajectories: NAME.traj. They have tool times, and no token counts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ttlcache.toolcalls import key_for_tool
from ttlcache.toolcalls.shell import OTHER
from ttlcache.types import GapKey
from ttlcache_sim.load.readers import model_calls
from ttlcache_sim.load.traces import Log, LogPart, Reader, RecordedProgram, Seconds


class _Step(LogPart):
    action: str = ""
    observation: Any = None
    response: Any = None
    execution_time: Seconds = None


class _Message(LogPart):
    role: str
    content: Any = None
    is_demo: bool = False


class _Trajectory(LogPart):
    trajectory: list[_Step]
    history: Sequence[_Message] = ()


def _recognises(log: Log) -> bool:
    return isinstance(log.first.get("trajectory"), list) and "info" in log.first


def _read(log: Log) -> Iterator[RecordedProgram]:
    for record in log.records:
        found, transcript = record.read(_Trajectory), model_calls.Transcript()
        for message in found.history:
            if message.role == "assistant" and not message.is_demo:
                break
            transcript.add_input(message.content)
        for step in found.trajectory:
            # The action is part of the response, or a tool call beside it.
            beside = step.action if step.action not in str(step.response) else ""
            tools, tool_s = _tools(step.action), step.execution_time
            transcript.add_answer(step.response, beside, tools=tools, tool_s=tool_s)
            transcript.add_input(step.observation)
        name = log.path.name.partition(".")[0]
        yield from model_calls.programs_of(name, transcript.calls)


def _tools(action: str) -> list[GapKey]:
    """A program of the shell, or a command of SWE-agent's own."""
    if not action.strip():
        return []
    key = key_for_tool("bash", action)
    return [key_for_tool(action.split()[0]) if key.executable == OTHER else key]


READER = Reader("SWE-agent", _recognises, _read)
