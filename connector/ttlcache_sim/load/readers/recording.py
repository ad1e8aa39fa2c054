"""What ttlcache itself records (`record_path`).

Where two requests go on from one turn, one of them is a program of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pydantic import BaseModel

from ttlcache.telemetry.recorder import FORMAT
from ttlcache.types import GapKey
from ttlcache_sim.load.readers import model_calls
from ttlcache_sim.load.traces import Log, Reader, RecordedProgram, Tokens


class _Event(BaseModel):
    t: float
    program: str
    turn: int


class _Arrive(_Event):
    prompt_tokens: Tokens
    follows: int | None


class _Finish(_Event):
    prompt_tokens: Tokens
    tokens: Tokens


class _Decide(_Event):
    tool: str


def _recognises(log: Log) -> bool:
    return log.first.get("format") == FORMAT


def _read(log: Log) -> Iterator[RecordedProgram]:
    calls: dict[int, model_calls.Call] = {}
    chains: list[tuple[str, list[int]]] = []
    chain_of: dict[int, list[int]] = {}  # its last turn -> the chain
    for record in log.records:
        kind = record.data.get("ev")
        is_known = record.data.get("turn") in calls  # its arrival may be rotated away
        if kind == "arrive":
            arrive = record.read(_Arrive)
            chain = chain_of.pop(arrive.follows or 0, None)
            if chain is None:
                chain = []
                chains.append((arrive.program, chain))
            chain.append(arrive.turn)
            chain_of[arrive.turn] = chain
            calls[arrive.turn] = model_calls.Call(arrive.prompt_tokens, 0, arrive.t)
        elif kind == "finish" and is_known:
            finish = record.read(_Finish)
            call, output = calls[finish.turn], finish.tokens - finish.prompt_tokens
            calls[finish.turn] = replace(call, output_tokens=output, end_s=finish.t)
        elif kind == "decide" and is_known:
            decide = record.read(_Decide)
            key = GapKey(*decide.tool.split(" ", 1))
            calls[decide.turn] = replace(calls[decide.turn], tools=[key])
    for program, chain in chains:
        yield from model_calls.programs_of(program, [calls[turn] for turn in chain])


READER = Reader("ttlcache's recording", _recognises, _read)
