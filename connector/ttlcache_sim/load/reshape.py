"""Programs from records, made longer or shorter, or measured."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from ttlcache_sim.load.programs import Program, Turn
from ttlcache_sim.load.traces import RecordedTurn


def stretch(
    turns: tuple[Turn, ...],
    scale: int,
    draw: Callable[[], tuple[str, float]] | None = None,
) -> tuple[Turn, ...]:
    """`scale` turns for each one, of 1/scale of its tokens (paper, Fig. 14).

    Every part has a gap: a fresh one from `draw`, or a copy of the turn's.
    """
    if scale > 1:
        turns = tuple(
            Turn(
                max(1, turn.new_prompt_tokens // scale),
                max(1, turn.output_tokens // scale),
                *(draw() if draw and part else (turn.tool, turn.gap_s)),
                turn.shared_tokens,
            )
            for turn in turns
            for part in range(scale)
        )
    return end(turns)


def fit_context(turns: tuple[Turn, ...], max_context: int) -> tuple[Turn, ...]:
    """The turns up to the one that would exceed `max_context`; at least one."""
    context, kept = 0, []
    for turn in turns:
        context += turn.new_prompt_tokens + turn.output_tokens
        if context > max_context:
            break
        kept.append(turn)
    if not kept:
        first = turns[0]
        output = min(first.output_tokens, max_context // 2)
        kept = [replace(first, new_prompt_tokens=max_context - output)]
        kept[0] = replace(kept[0], output_tokens=output)
    return end(tuple(kept))


def end(turns: tuple[Turn, ...]) -> tuple[Turn, ...]:
    """Nothing follows the last turn."""
    return (*turns[:-1], replace(turns[-1], tool="", gap_s=0.0))


def mean_context(programs: tuple[Program, ...]) -> float:
    """Mean tokens of the context that a finished turn leaves, over all turns."""
    contexts = [context for program in programs for context in _contexts(program)]
    return math.fsum(contexts) / len(contexts)


def _contexts(program: Program) -> list[int]:
    total, contexts = 0, []
    for turn in program.turns:
        total += turn.new_prompt_tokens + turn.output_tokens
        contexts.append(total)
    return contexts


def turn_of(recorded: RecordedTurn) -> Turn:
    """A recorded turn as it stands; an unknown gap is NaN."""
    tool = recorded.tool or ""
    # For shell agents the executable predicts the gap, "bash" does not.
    name = recorded.exe if tool == "bash" else tool
    gap_s = math.nan if recorded.tool_s is None else recorded.tool_s
    return Turn(
        recorded.new_prompt_tokens,
        recorded.output_tokens,
        name or tool,
        gap_s,
        recorded.shared_tokens,
    )
