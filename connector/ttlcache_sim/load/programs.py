"""Agent programs to replay: what each turn adds, produces, and waits for."""

from __future__ import annotations

import random
from dataclasses import dataclass


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
    shared_tokens: int = 0
    """Of a first prompt, those at its head that other programs begin with, too."""


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


def poisson_arrivals(num: int, rate: float, seed: int) -> tuple[float, ...]:
    """Arrival times in seconds: exponential gaps of mean 1/rate, the first at 0."""
    rng = random.Random(f"{seed}/arrivals")
    times = [0.0]
    while len(times) < num:
        times.append(times[-1] + rng.expovariate(rate))
    return tuple(times[:num])
