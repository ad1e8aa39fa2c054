"""Programs for a tiny model and a short run: synthetic ones, and those of a trace.

Token counts are scaled to the model; gaps are real seconds.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from ttlcache_sim.load.gap_mix import GapMix, Tool
from ttlcache_sim.load.programs import Moments, Program, Turn, poisson_arrivals
from ttlcache_sim.load.readers import read_programs
from ttlcache_sim.load.reshape import end, turn_of
from ttlcache_sim.load.shapes import SHAPES
from ttlcache_sim.load.traces import TraceError

_FIRST_PROMPT_SHARE = 0.12
_TURN_SIZE_SIGMA = 0.7
_MIN_TURNS = 2
_MIN_NEW_TOKENS = _MIN_PROMPT_TOKENS = 8
_MIN_OUTPUT_TOKENS = 4

#: Reading and editing is frequent and quick, tests and installs are rare and slow.
SCALED_TOOLS = (
    Tool("cat", 0.24, 0.15),
    Tool("grep", 0.18, 0.3),
    Tool("sed", 0.14, 0.15),
    Tool("ls", 0.10, 0.1),
    Tool("edit", 0.14, 0.25),
    Tool("python", 0.11, 2.0),
    Tool("pytest", 0.07, 6.0),
    Tool("pip", 0.02, 8.0),
)


#: A row of the paper's Table 2, at full scale.
SWE_BENCH = SHAPES["swe"]
#: Share of the tokens that the model generates (ours: the table has none).
OUTPUT_SHARE = 0.08


@dataclass(frozen=True, slots=True)
class TraceScale:
    """How recorded programs are fitted to a small model and a short run."""

    mean_context_tokens: int = 4_000
    """The replayed programs' mean final context; one factor for all of them."""
    max_context_tokens: int = 12_000
    """Turns that would grow a program beyond this are dropped."""
    max_turns: int = 14
    """Later turns are dropped."""
    gap_cap_s: float = 10.0
    """Longest gap in seconds."""


def synthetic(
    num_programs: int,
    rate: float,
    seed: int,
    token_scale: float = 1.0,
    gap_cap_s: float = math.inf,
) -> tuple[Program, ...]:
    """Programs of Table 2's SWE-bench row with Poisson arrivals.

    Args:
        num_programs: how many.
        rate: arrivals per second; the first arrives at 0.
        seed: same seed, same programs.
        token_scale: factor on the token counts; turns and seconds stay as they are.
        gap_cap_s: longest gap in seconds; a finite cap lowers the gaps' moments.
    """
    if num_programs < 1 or rate <= 0 or token_scale <= 0 or gap_cap_s <= 0:
        raise ValueError(
            "num_programs, rate, token_scale and gap_cap_s must be positive, got "
            f"{num_programs}, {rate:g}, {token_scale:g}, {gap_cap_s:g}"
        )
    tool_times = GapMix.fit(SWE_BENCH.tool_s, SCALED_TOOLS)
    arrivals = poisson_arrivals(num_programs, rate, seed)
    programs = []
    for index, arrival_s in enumerate(arrivals):
        rng = random.Random(f"{seed}/synthetic/{index}")
        num_turns = max(_MIN_TURNS, round(_normal(rng, SWE_BENCH.turns)))
        tokens = (
            max(0.2 * SWE_BENCH.tokens.mean, _normal(rng, SWE_BENCH.tokens))
            * token_scale
        )
        prompts = _split(tokens * (1.0 - OUTPUT_SHARE), num_turns, rng)
        output_mean = tokens * OUTPUT_SHARE / num_turns
        turns = []
        for turn, prompt in enumerate(prompts):
            last = turn == num_turns - 1
            tool, gap_s = ("", 0.0) if last else tool_times.draw(rng)
            output = round(output_mean * rng.uniform(0.5, 1.5))
            turns.append(
                Turn(
                    max(_MIN_NEW_TOKENS, round(prompt)),
                    max(_MIN_OUTPUT_TOKENS, output),
                    tool,
                    min(gap_s, gap_cap_s),
                )
            )
        programs.append(Program(f"agent-{index:03d}", arrival_s, tuple(turns)))
    return tuple(programs)


def from_trace(
    path: Path,
    num_programs: int,
    rate: float,
    seed: int,
    scale: TraceScale | None = None,
    half: str = "",
) -> tuple[Program, ...]:
    """The first programs of a trace with two turns or more, scaled to the model.

    Arrivals are Poisson with ``rate`` per second, because most traces have none. An
    unknown tool time becomes the median of the file's known ones, or the mean of the
    paper's SWE-bench row when the file knows none.

    Args:
        half: "odd" or "even": only these lines, counted from 1; "": all.

    Raises:
        TraceError: unreadable file, bad line, or no usable program.
    """
    if num_programs < 1 or rate <= 0:
        raise ValueError(
            f"num_programs and rate must be positive, got {num_programs}, {rate:g}"
        )
    scale = scale or TraceScale()
    recorded = []
    first = {"": 0, "odd": 0, "even": 1}[half]
    for each in islice(read_programs(path), first, None, 2 if half else 1):
        if len(each.turns) >= 2:
            turns = end(tuple(map(turn_of, each.turns[: scale.max_turns])))
            recorded.append(Program(each.program_id, 0.0, turns))
        if len(recorded) == num_programs:
            break
    if not recorded:
        raise TraceError(f"{path}: no program with at least two turns")
    mean_context = statistics.fmean(p.context_tokens for p in recorded)
    factor = min(1.0, scale.mean_context_tokens / mean_context)
    unknown_gap_s = _typical_gap_s(recorded)
    arrivals = poisson_arrivals(len(recorded), rate, seed)
    return tuple(
        Program(
            program.program_id,
            arrival_s,
            _fit(program.turns, factor, unknown_gap_s, scale),
        )
        for program, arrival_s in zip(recorded, arrivals, strict=True)
    )


def _fit(
    turns: Sequence[Turn], factor: float, unknown_gap_s: float, scale: TraceScale
) -> tuple[Turn, ...]:
    fitted: list[Turn] = []
    context = 0
    for turn in turns:
        prompt = max(_MIN_PROMPT_TOKENS, round(turn.new_prompt_tokens * factor))
        output = max(_MIN_OUTPUT_TOKENS, round(turn.output_tokens * factor))
        if not fitted:
            prompt = min(prompt, scale.max_context_tokens // 2)
            output = min(output, scale.max_context_tokens // 2)
        if context + prompt + output > scale.max_context_tokens:
            break
        context += prompt + output
        gap_s = unknown_gap_s if math.isnan(turn.gap_s) else turn.gap_s
        fitted.append(Turn(prompt, output, turn.tool, min(gap_s, scale.gap_cap_s)))
    return end(tuple(fitted))


def _typical_gap_s(programs: Sequence[Program]) -> float:
    gaps = [turn.gap_s for program in programs for turn in program.turns[:-1]]
    known = [gap_s for gap_s in gaps if not math.isnan(gap_s)]
    return statistics.median(known) if known else SWE_BENCH.tool_s.mean


def shuffled(programs: Sequence[Program], seed: int) -> tuple[Program, ...]:
    """The same programs in another order, all there from the start."""
    order = random.Random(f"{seed}/order").sample(programs, len(programs))
    return tuple(replace(program, arrival_s=0.0) for program in order)


def longest_context(programs: Sequence[Program]) -> int:
    """Tokens of the largest final context."""
    return max(program.context_tokens for program in programs)


def _normal(rng: random.Random, moments: Moments) -> float:
    return rng.gauss(moments.mean, moments.std)


def _split(tokens: float, num_turns: int, rng: random.Random) -> list[float]:
    """Prompt tokens of each turn: a fixed share first, the rest log-normal."""
    first = tokens * _FIRST_PROMPT_SHARE
    weights = [rng.lognormvariate(0.0, _TURN_SIZE_SIGMA) for _ in range(num_turns - 1)]
    unit = (tokens - first) / sum(weights)
    return [first, *(weight * unit for weight in weights)]
