"""What is replayed: agent programs, and when they arrive.

All times in seconds, all tokens at full scale. Same spec, same programs, on every
machine: only `random.Random` with textual seeds is used.
"""

from __future__ import annotations

import math
import operator
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from ttlcache_sim.load.feed import Loop, parse_loop
from ttlcache_sim.load.gap_mix import GapMix
from ttlcache_sim.load.programs import Moments, Program, Turn
from ttlcache_sim.load.readers import read_programs
from ttlcache_sim.load.reshape import fit_context, stretch, turn_of
from ttlcache_sim.load.shapes import SHAPES, Shape
from ttlcache_sim.load.traces import TraceError

#: Generated tokens of a turn: weka_claude_code has mean 433, median 240,
#: tb_mini_swe_agent mean 416, median 103; the paper's Table 2 has no such row.
OUTPUT_TOKENS = Moments(250.0, 120.0)
#: Weight of the first prompt against the others, in a Dirichlet split.
_FIRST_WEIGHT = 3.0
#: Share of the model's context that the longest drawn programs have.
_LONGEST = 0.95
_MIN_TOKENS = 16
_MIN_TURNS = 2

Body = tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class WorkloadSpec:
    """What to replay.

    name: a key of `SHAPES`, or "trace:PATH".
    rate: mean arrivals a second. arrivals: poisson, closed:N or rollout:N:K.
    turn_scale: factor on the number of turns at constant tokens.
    half: "", or "odd" / "even" lines of the trace file (the first line is odd).
    max_context: programs are cut before the turn that would exceed it.
    warm_up, drain: of the programs, so many first and last ones are not counted.
    shared_tokens: at the head of first prompts, the same in all of them.
    """

    name: str
    programs: int
    rate: float
    seed: int
    arrivals: str = "poisson"
    turn_scale: int = 1
    half: str = ""
    max_context: int = 131_072
    warm_up: int = 0
    drain: int = 0
    shared_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Workload:
    """Programs by arrival, or in the order in which a loop takes them.

    num_cut: programs that the model's context cut short.
    repeats: how often each program of a short trace comes, 1 at least.
    """

    programs: tuple[Program, ...]
    loop: Loop | None = None
    num_cut: int = 0
    repeats: float = 1.0

    @property
    def caveat(self) -> str:
        """What a reader has to know of the programs; empty where nothing is."""
        told = []
        if self.num_cut:
            cut = f"{self.num_cut} of {len(self.programs)} programs"
            told.append(f"{cut} are cut to the model's context")
        if self.repeats > 1.0:
            told.append(f"each program of the trace comes {self.repeats:.1f} times")
        return "; ".join(told)


def build(spec: WorkloadSpec) -> Workload:
    """The programs of a spec.

    Raises:
        ValueError: unknown name or arrivals, or numbers out of range.
        ttlcache_sim.load.traces.TraceError: unreadable trace.
    """
    if spec.programs < 1 or spec.rate <= 0 or spec.turn_scale < 1:
        raise ValueError("programs, rate and turn scale must be positive")
    bodies, repeats = _bodies(spec)
    fitted = [fit_context(turns, spec.max_context) for turns in bodies]
    loop = parse_loop(spec.arrivals)
    times = [0.0] * len(bodies) if loop else _arrivals(spec, len(bodies))
    programs = tuple(
        Program(f"agent-{i:04d}", time_s, turns)
        for i, (time_s, turns) in enumerate(zip(times, fitted, strict=True))
    )
    if spec.name in SHAPES:  # drawn shorter, not cut
        limit = 0.999 * _LONGEST * spec.max_context
        num_cut = sum(program.context_tokens >= limit for program in programs)
    else:
        num_cut = sum(map(operator.ne, bodies, fitted))
    return Workload(programs, loop, num_cut, repeats)


def _bodies(spec: WorkloadSpec) -> tuple[list[Body], float]:
    """Before they are cut to the model's context; how often each one comes."""
    kind, _, path = spec.name.partition(":")
    if kind == "trace" and path:
        of_file = recorded_programs(Path(path), spec.half)
        drawn = draw_programs(of_file, spec.programs, spec.seed)
        repeats = max(1.0, spec.programs / len(of_file))
        return [stretch(turns, spec.turn_scale) for turns in drawn], repeats
    if spec.name in SHAPES:
        draw = _drawer(SHAPES[spec.name], spec)
        return [draw(index) for index in range(spec.programs)], 1.0
    known = ", ".join(SHAPES)
    raise ValueError(f"workload {spec.name!r}: expected {known} or trace:PATH")


def recorded_programs(path: Path, half: str) -> tuple[Body, ...]:
    """The file's programs; an unknown tool time becomes the median of its known ones.

    Args:
        half: "", "odd" or "even": only those lines of the file, the first being odd.
    """
    bodies = _read_bodies(path)
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
def _read_bodies(path: Path) -> tuple[Body, ...]:
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


def _drawer(shape: Shape, spec: WorkloadSpec) -> Callable[[int], Body]:
    gaps = GapMix.fit(shape.tool_s, shape.tools)

    def draw(index: int) -> Body:
        rng = random.Random(f"{spec.seed}/{spec.name}/{index}")
        count = max(_MIN_TURNS, round(rng.gauss(shape.turns.mean, shape.turns.std)))
        # The longest contexts are cut like the paper's, by the model's window.
        total = rng.gauss(shape.tokens.mean, shape.tokens.std)
        total = min(max(total, 0.1 * shape.tokens.mean), _LONGEST * spec.max_context)
        outputs = [_output(rng) for _ in range(count)]
        prompts = _split(max(total - sum(outputs), 0.2 * total), count, rng)
        turns = [
            Turn(max(_MIN_TOKENS, round(prompt)), output, *gaps.draw(rng))
            for prompt, output in zip(prompts, outputs, strict=True)
        ]
        return stretch(tuple(turns), spec.turn_scale, lambda: gaps.draw(rng))

    return draw


def _output(rng: random.Random) -> int:
    scale = OUTPUT_TOKENS.std**2 / OUTPUT_TOKENS.mean
    return max(_MIN_TOKENS, round(rng.gammavariate(OUTPUT_TOKENS.mean / scale, scale)))


def _split(tokens: float, count: int, rng: random.Random) -> list[float]:
    parts = [rng.gammavariate(_FIRST_WEIGHT, 1.0)]
    parts += [rng.gammavariate(1.0, 1.0) for _ in range(count - 1)]
    unit = tokens / sum(parts)
    return [part * unit for part in parts]


def _arrivals(spec: WorkloadSpec, count: int) -> list[float]:
    rng = random.Random(f"{spec.seed}/arrivals/{spec.arrivals}")
    if spec.arrivals != "poisson":
        raise ValueError(
            f"arrivals {spec.arrivals!r}: expected poisson, closed:N or rollout:N:K"
        )
    times = [0.0]
    while len(times) < count:
        times.append(times[-1] + rng.gammavariate(1.0, 1.0 / spec.rate))
    return times
