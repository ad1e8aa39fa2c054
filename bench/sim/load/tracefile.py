"""Recorded programs at full scale, drawn from a trace file by seed."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from bench.sim.load.programs import Turn
from bench.sim.load.readers import read_programs
from bench.sim.load.traces import RecordedTurn, TraceError

Body = tuple[Turn, ...]


def recorded_programs(path: Path, half: str) -> tuple[Body, ...]:
    """The file's programs; an unknown tool time becomes the median of its known ones.

    Args:
        half: "", "odd" or "even": only those lines of the file, the first being odd.
    """
    bodies = _bodies(path)
    if half:
        bodies = bodies[{"odd": 0, "even": 1}[half] :: 2]
    if not bodies:
        raise TraceError(f"{path}: no program")
    return bodies


def draw_programs(bodies: Sequence[Body], number: int, seed: int) -> list[Body]:
    """In an order drawn by `seed`; all of them again when they are too few."""
    rng = random.Random(f"{seed}/trace")
    drawn: list[Body] = []
    while len(drawn) < number:
        drawn += rng.sample(bodies, len(bodies))
    return drawn[:number]


@lru_cache(maxsize=4)
def _bodies(path: Path) -> tuple[Body, ...]:
    bodies = [tuple(map(turn_of, each.turns)) for each in read_programs(path)]
    gaps = [turn.gap_s for body in bodies for turn in body[:-1]]
    known = [gap_s for gap_s in gaps if not math.isnan(gap_s)]
    if not known:
        raise TraceError(f"{path}: no tool time is known")
    typical_s = statistics.median(known)
    return tuple(
        tuple(
            replace(
                turn,
                new_prompt_tokens=max(1, turn.new_prompt_tokens),
                output_tokens=max(1, turn.output_tokens),
                gap_s=typical_s if math.isnan(turn.gap_s) else turn.gap_s,
            )
            for turn in body
        )
        for body in bodies
    )


def turn_of(recorded: RecordedTurn) -> Turn:
    """A recorded turn as it stands; an unknown gap is NaN."""
    tool = recorded.tool or ""
    # For shell agents the executable predicts the gap, "bash" does not.
    name = recorded.exe if tool == "bash" else tool
    gap_s = math.nan if recorded.tool_s is None else recorded.tool_s
    return Turn(recorded.new_prompt_tokens, recorded.output_tokens, name or tool, gap_s)
