"""Recorded programs as sequences of gaps, for `python -m bench gaps`.

What a trace does not say is filled in the same way every time:

arrivals    `arrival_s` where every program has one, else Poisson with a fixed seed.
turn time   `llm_s`; else up to the next request less the gap; else output tokens
            at `DECODE_S_PER_TOKEN`.
gap         `tool_s`; else what the request times leave (unknown otherwise: such a
            turn is neither decided nor learnt from).
gap key     the tool through `key_for_tool`, its masked command (`python <path>.py`)
            standing for the arguments. A turn without a call (`__user__`,
            `__format_error__`, none) is of the class user: when it ends nobody
            knows whether a person will answer.
last turn   nobody comes back. mini-swe-agent's last `echo <arg>` is its submit
            marker, masked by the trace; the parser reads that as final.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ttlcache.toolcalls import key_for_tool
from ttlcache.types import FINAL_GAP, USER_GAP, USER_TOOL, GapKey
from ttlcache_sim.load.programs import poisson_arrivals
from ttlcache_sim.load.readers import read_programs
from ttlcache_sim.load.traces import DECODE_S_PER_TOKEN, RecordedTurn, TraceError

_NO_CALL = frozenset({USER_TOOL, "__format_error__", ""})
_MASKED_ARGUMENT = re.compile(r"<arg>")
_MASK = re.compile(r"[<>]")
#: Program arrivals a second where a trace has no times of them.
RATE = 0.1


@dataclass(frozen=True, slots=True)
class GapTurn:
    """One request and the gap after it."""

    key: GapKey
    prompt_tokens: int
    """The whole prompt, earlier turns included."""
    output_tokens: int
    llm_s: float
    """Seconds from the request to the end of its output."""
    gap_s: float
    """Seconds to the next request; inf: nobody came back; NaN: unknown."""


@dataclass(frozen=True, slots=True)
class GapProgram:
    """An agent's whole job."""

    program_id: str
    arrival_s: float
    turns: tuple[GapTurn, ...]


def read_gaps(path: Path) -> tuple[GapProgram, ...]:
    """The programs of a trace at full scale, in arrival order.

    Raises:
        TraceError: unreadable file, bad line, or not one known gap.
    """
    recorded = list(read_programs(path))
    arrivals = [program.arrival_s for program in recorded]
    if None in arrivals:
        arrivals = list(poisson_arrivals(len(recorded), RATE, seed=0))
    programs = [
        GapProgram(program.program_id, arrival_s, _turns(program.turns))
        for program, arrival_s in zip(recorded, arrivals, strict=True)
        if arrival_s is not None
    ]
    if not any(math.isfinite(t.gap_s) for p in programs for t in p.turns):
        raise TraceError(f"{path}: not one known gap")
    return tuple(sorted(programs, key=lambda program: program.arrival_s))


def _turns(recorded: Sequence[RecordedTurn]) -> tuple[GapTurn, ...]:
    turns: list[GapTurn] = []
    context = 0
    for index, turn in enumerate(recorded):
        is_last = index + 1 == len(recorded)
        prompt = context + turn.new_prompt_tokens
        context = prompt + turn.output_tokens
        llm_s, gap_s = _seconds(turn.llm_s), _seconds(turn.tool_s)
        if is_last:
            gap_s = math.inf
        else:
            following_s = _seconds(recorded[index + 1].start_s)
            period_s = following_s - _seconds(turn.start_s)
            llm_s = _known(llm_s, period_s - gap_s)
            gap_s = _known(gap_s, period_s - llm_s)
        turns.append(
            GapTurn(
                key=gap_key(turn, is_last),
                prompt_tokens=prompt,
                output_tokens=turn.output_tokens,
                llm_s=_known(llm_s, DECODE_S_PER_TOKEN * turn.output_tokens),
                gap_s=gap_s,
            )
        )
    return tuple(turns)


def _seconds(value_s: float | None) -> float:
    return math.nan if value_s is None else value_s


def _known(value_s: float, otherwise_s: float) -> float:
    """`value_s`, or where it is unknown the alternative, not below 0."""
    if not math.isnan(value_s):
        return value_s
    return otherwise_s if math.isnan(otherwise_s) else max(0.0, otherwise_s)


def gap_key(turn: RecordedTurn, is_last: bool = False) -> GapKey:
    """The gap key of a recorded turn, as the controller would have named it."""
    tool = turn.tool or ""
    if tool in _NO_CALL or tool.endswith(f"+{USER_TOOL}"):
        return USER_GAP
    if is_last and tool == "bash" and turn.exe == "echo":
        return FINAL_GAP
    masked = turn.eff or turn.exe or ""
    command = _MASK.sub("", _MASKED_ARGUMENT.sub("", masked)).strip()
    names = [name for name in tool.split("+") if name]
    return GapKey.parallel(tuple(key_for_tool(name, command) for name in names))
