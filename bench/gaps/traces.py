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
from typing import Any

from bench.sim.load.programs import poisson_arrivals
from bench.sim.traces import TraceError, count, read_records, seconds
from ttlcache.toolcalls import key_for_tool
from ttlcache.types import FINAL_GAP, USER_GAP, USER_TOOL, GapKey

#: Seconds a generated token where the trace has no latency: 50 tokens a second.
DECODE_S_PER_TOKEN = 0.02
_NO_CALL = frozenset({USER_TOOL, "__format_error__", ""})
_MASKED_ARGUMENT = re.compile(r"<arg>")
_MASK = re.compile(r"[<>]")


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


def read_gaps(path: Path, rate: float, seed: int) -> tuple[GapProgram, ...]:
    """The programs of a trace at full scale, in arrival order.

    Args:
        path: gzip JSON lines.
        rate: program arrivals per second where the trace has no arrival times.
        seed: of those arrivals.

    Raises:
        TraceError: unreadable file, bad line, or not one known gap.
    """
    if rate <= 0:
        raise ValueError(f"rate must be positive, got {rate:g}")
    records = list(read_records(path))
    recorded = [seconds(record, "arrival_s", where) for record, where in records]
    if any(math.isnan(arrival_s) for arrival_s in recorded):
        recorded = list(poisson_arrivals(len(records), rate, seed))
    programs = [
        GapProgram(record["program_id"], arrival_s, _turns(record["turns"], where))
        for (record, where), arrival_s in zip(records, recorded, strict=True)
    ]
    if not any(math.isfinite(t.gap_s) for p in programs for t in p.turns):
        raise TraceError(f"{path}: not one known gap")
    return tuple(sorted(programs, key=lambda program: program.arrival_s))


def _turns(raw: Sequence[dict[str, Any]], where: str) -> tuple[GapTurn, ...]:
    turns: list[GapTurn] = []
    context = 0
    for index, turn in enumerate(raw):
        place = f"{where}: turns[{index}]"
        is_last = index + 1 == len(raw)
        prompt = context + count(turn, "new_prompt_tokens", place)
        context = prompt + count(turn, "output_tokens", place)
        llm_s = seconds(turn, "llm_s", place)
        gap_s = seconds(turn, "tool_s", place)
        if is_last:
            gap_s = math.inf
        else:
            following_s = seconds(raw[index + 1], "start_s", place)
            period_s = following_s - seconds(turn, "start_s", place)
            llm_s = _known(llm_s, period_s - gap_s)
            gap_s = _known(gap_s, period_s - llm_s)
        turns.append(
            GapTurn(
                key=gap_key(turn, is_last),
                prompt_tokens=prompt,
                output_tokens=context - prompt,
                llm_s=_known(llm_s, DECODE_S_PER_TOKEN * (context - prompt)),
                gap_s=gap_s,
            )
        )
    return tuple(turns)


def _known(value_s: float, otherwise_s: float) -> float:
    """`value_s`, or where it is unknown the alternative, not below 0."""
    if not math.isnan(value_s):
        return value_s
    return otherwise_s if math.isnan(otherwise_s) else max(0.0, otherwise_s)


def gap_key(turn: dict[str, Any], is_last: bool = False) -> GapKey:
    """The gap key of a recorded turn, as the controller would have named it."""
    tool = str(turn.get("tool") or "")
    if tool in _NO_CALL or tool.endswith(f"+{USER_TOOL}"):
        return USER_GAP
    if is_last and tool == "bash" and turn.get("exe") == "echo":
        return FINAL_GAP
    masked = str(turn.get("eff") or turn.get("exe") or "")
    command = _MASK.sub("", _MASKED_ARGUMENT.sub("", masked)).strip()
    names = [name for name in tool.split("+") if name]
    return GapKey.parallel(tuple(key_for_tool(name, command) for name in names))
