"""mini-swe-agent's trajectories: NAME.traj.json.

A message of the agent has the time at which it came, one with a command's output the
time at which the command had ended. Early versions have neither, nor usage.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ttlcache.toolcalls import detect, key_for_tool
from ttlcache.types import GapKey
from ttlcache_sim.load.readers import model_calls
from ttlcache_sim.load.traces import Log, LogPart, Moment, Reader, RecordedProgram


class _Action(LogPart):
    command: str = ""


class _Response(LogPart):
    usage: model_calls.Usage | None = None


class _Extra(LogPart):
    timestamp: Moment | None = None
    actions: Sequence[_Action] = ()
    response: _Response | Any = None


class _Message(LogPart):
    role: str
    content: Any = None
    tool_calls: Any = None
    extra: _Extra = _Extra()

    @property
    def tools(self) -> Sequence[GapKey]:
        keys = [key_for_tool("bash", action.command) for action in self.extra.actions]
        found = detect(self.content) if isinstance(self.content, str) else None
        return keys or ([found] if found else [])


class _Trajectory(LogPart):
    instance_id: str | None = None
    messages: list[_Message]


def _recognises(log: Log) -> bool:
    return str(log.first.get("trajectory_format", "")).startswith("mini-swe-agent")


def _read(log: Log) -> Iterator[RecordedProgram]:
    for record in log.records:
        trajectory, transcript = record.read(_Trajectory), model_calls.Transcript()
        for message in trajectory.messages:
            extra, texts = message.extra, (message.content, message.tool_calls)
            if message.role == "assistant":
                told, at_s = extra.response, extra.timestamp
                usage = told.usage if isinstance(told, _Response) else None
                transcript.add_answer(
                    *texts, tools=message.tools, usage=usage, at_s=at_s
                )
            else:
                transcript.add_input(*texts, at_s=extra.timestamp)
        name = trajectory.instance_id or log.path.name.partition(".")[0]
        yield from model_calls.programs_of(name, transcript.calls)


READER = Reader("mini-swe-agent", _recognises, _read)
