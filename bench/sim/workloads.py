"""Agent programs to replay: what each turn adds, produces, and waits for.

Token counts are already scaled to the model; gaps are real seconds.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

_FIRST_PROMPT_SHARE = 0.12
_TURN_SIZE_SIGMA = 0.7
_MIN_TURNS = 2
_MIN_NEW_TOKENS = 8
_MIN_OUTPUT_TOKENS = 4


@dataclass(frozen=True, slots=True)
class Turn:
    """One LLM request of a program and the gap that follows it."""

    new_prompt_tokens: int
    """Tokens added to the context since the previous turn's output."""
    output_tokens: int
    """Tokens to generate, exactly."""
    tool: str
    """Name of the tool that runs in the gap; empty on the last turn."""
    gap_s: float
    """Seconds from the end of this turn to the next request; 0 on the last turn."""


@dataclass(frozen=True, slots=True)
class Program:
    """An agent's whole job."""

    program_id: str
    arrival_s: float
    """Seconds from the start of the replay to the first request."""
    turns: tuple[Turn, ...]

    @property
    def context_tokens(self) -> int:
        """Tokens of the final context: all prompts and outputs."""
        return sum(turn.new_prompt_tokens + turn.output_tokens for turn in self.turns)


@dataclass(frozen=True, slots=True)
class Moments:
    """Mean and standard deviation."""

    mean: float
    std: float


@dataclass(frozen=True, slots=True)
class Shape:
    """A row of the paper's Table 2, at full scale."""

    turns: Moments
    tool_s: Moments
    tokens: Moments
    """Final context of a program, in tokens."""
    output_share: float
    """Share of the tokens that the model generates (ours: the table has none)."""


SWE_BENCH = Shape(
    turns=Moments(10.9, 2.1),
    tool_s=Moments(0.925, 3.550),
    tokens=Moments(70_126.0, 19_732.0),
    output_share=0.08,
)


@dataclass(frozen=True, slots=True)
class ToolKind:
    """A tool of the synthetic agent: how often it runs and how slow it is."""

    name: str
    weight: float
    relative_mean: float
    """Mean seconds relative to the other tools; normalised over the mix."""


#: Reading and editing is frequent and quick, tests and installs are rare and slow.
SWE_TOOLS = (
    ToolKind("cat", 0.24, 0.15),
    ToolKind("grep", 0.18, 0.3),
    ToolKind("sed", 0.14, 0.15),
    ToolKind("ls", 0.10, 0.1),
    ToolKind("edit", 0.14, 0.25),
    ToolKind("python", 0.11, 2.0),
    ToolKind("pytest", 0.07, 6.0),
    ToolKind("pip", 0.02, 8.0),
)


@dataclass(frozen=True, slots=True)
class ToolTimes:
    """Log-normal durations per tool whose mixture has the wanted mean and std.

    All tools share one sigma: with normalised relative means ``m_i`` of weight
    ``w_i``, ``E[T^2] = mean^2 * sum(w_i m_i^2) * exp(sigma^2)``.
    """

    mean_s: tuple[float, ...]
    sigma: float
    tools: tuple[ToolKind, ...]

    @classmethod
    def fit(cls, wanted: Moments, tools: tuple[ToolKind, ...]) -> ToolTimes:
        """Solve for the per-tool means (seconds) and the common sigma."""
        weight = sum(tool.weight for tool in tools)
        level = sum(tool.weight * tool.relative_mean for tool in tools) / weight
        means = [tool.relative_mean / level for tool in tools]
        spread = sum(t.weight * m * m for t, m in zip(tools, means, strict=True))
        ratio = (1.0 + (wanted.std / wanted.mean) ** 2) / (spread / weight)
        if ratio < 1.0:
            raise ValueError(
                f"tools differ more than the wanted std of {wanted.std:g} s allows"
            )
        mean_s = tuple(wanted.mean * mean for mean in means)
        return cls(mean_s, math.sqrt(math.log(ratio)), tools)

    def draw(self, rng: random.Random) -> tuple[str, float]:
        """A tool's name and its duration in seconds."""
        weights = [tool.weight for tool in self.tools]
        (index,) = rng.choices(range(len(self.tools)), weights)
        mu = math.log(self.mean_s[index]) - self.sigma**2 / 2
        return self.tools[index].name, rng.lognormvariate(mu, self.sigma)


def synthetic(
    num_programs: int,
    rate: float,
    seed: int,
    token_scale: float = 1.0,
    gap_cap_s: float = math.inf,
    shape: Shape = SWE_BENCH,
) -> tuple[Program, ...]:
    """Programs of a Table-2 shape with Poisson arrivals.

    Args:
        num_programs: how many.
        rate: arrivals per second; the first arrives at 0.
        seed: same seed, same programs.
        token_scale: factor on the token counts; turns and seconds stay as they are.
        gap_cap_s: longest gap in seconds; a finite cap lowers the gaps' moments.
        shape: moments to draw from.
    """
    if num_programs < 1 or rate <= 0 or token_scale <= 0 or gap_cap_s <= 0:
        raise ValueError(
            "num_programs, rate, token_scale and gap_cap_s must be positive, got "
            f"{num_programs}, {rate:g}, {token_scale:g}, {gap_cap_s:g}"
        )
    tool_times = ToolTimes.fit(shape.tool_s, SWE_TOOLS)
    arrivals = poisson_arrivals(num_programs, rate, seed)
    programs = []
    for index, arrival_s in enumerate(arrivals):
        rng = random.Random(f"{seed}/synthetic/{index}")
        num_turns = max(_MIN_TURNS, round(_normal(rng, shape.turns)))
        tokens = max(0.2 * shape.tokens.mean, _normal(rng, shape.tokens)) * token_scale
        prompts = _split(tokens * (1.0 - shape.output_share), num_turns, rng)
        output_mean = tokens * shape.output_share / num_turns
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


def poisson_arrivals(num: int, rate: float, seed: int) -> tuple[float, ...]:
    """Arrival times in seconds: exponential gaps of mean 1/rate, the first at 0."""
    rng = random.Random(f"{seed}/arrivals")
    times = [0.0]
    while len(times) < num:
        times.append(times[-1] + rng.expovariate(rate))
    return tuple(times[:num])


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
