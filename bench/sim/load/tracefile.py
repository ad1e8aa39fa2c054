"""Recorded programs at full scale, drawn from a trace file by seed."""

from __future__ import annotations

import math
import random
import statistics
from functools import lru_cache
from pathlib import Path
from typing import Any

from bench.sim.load.programs import Turn
from bench.sim.traces import TraceError, count, read_records, seconds

Body = tuple[Turn, ...]


def recorded_programs(path: Path, number: int, seed: int, half: str) -> list[Body]:
    """Programs in an order drawn by `seed`; the whole file again when it is short.

    An unknown tool time becomes the median of the file's known ones.

    Args:
        half: "", "odd" or "even": only those lines of the file, the first being odd.
    """
    bodies = _agents(path)
    if half:
        bodies = bodies[{"odd": 0, "even": 1}[half] :: 2]
    return _draw(bodies, number, seed, path)


def _draw(bodies: tuple[Body, ...], number: int, seed: int, path: Path) -> list[Body]:
    if not bodies:
        raise TraceError(f"{path}: no program")
    rng = random.Random(f"{seed}/trace")
    drawn: list[Body] = []
    while len(drawn) < number:
        drawn += rng.sample(bodies, len(bodies))
    return drawn[:number]


@lru_cache(maxsize=4)
def _agents(path: Path) -> tuple[Body, ...]:
    records = [(r["turns"], where) for r, where in read_records(path)]
    known = [
        turn["tool_s"]
        for turns, _ in records
        for turn in turns[:-1]
        if turn.get("tool_s") is not None
    ]
    if not known:
        raise TraceError(f"{path}: no tool time is known")
    typical_s = float(statistics.median(known))

    def parse(turn: dict[str, Any], where: str) -> Turn:
        found = parse_turn(turn, where)
        return Turn(
            max(1, found.new_prompt_tokens),
            max(1, found.output_tokens),
            found.tool,
            typical_s if math.isnan(found.gap_s) else found.gap_s,
        )

    return tuple(
        tuple(parse(turn, f"{where}: turns[{i}]") for i, turn in enumerate(turns))
        for turns, where in records
    )


def parse_turn(turn: dict[str, Any], where: str) -> Turn:
    """A recorded turn as it stands; an unknown gap is NaN."""
    tool = turn.get("tool") or ""
    # For shell agents the executable predicts the gap, "bash" does not.
    name = turn.get("exe") if tool == "bash" else tool
    return Turn(
        count(turn, "new_prompt_tokens", where),
        count(turn, "output_tokens", where),
        str(name or tool),
        seconds(turn, "tool_s", where),
    )
