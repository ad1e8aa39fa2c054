"""What a cell is: plain data, hashable, picklable, JSON-able."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.command import option
from bench.sim.rivals.arms import Arm
from ttlcache_sim.load.workload import WorkloadSpec
from ttlcache_sim.steps.hardware import HARDWARE
from ttlcache_sim.steps.models import MODELS
from ttlcache_sim.steps.profile import load_profile
from ttlcache_sim.steps.steptime import Roofline, StepTime


@dataclass(frozen=True, slots=True)
class EngineSetting:
    """The engine of a cell; blocks of `block_size` tokens.

    tell_last: whether clients say which turn is their last one.
    repeat_output: whether prompts hold earlier outputs, or other text in their place.
    profile: step times of a real server, in place of the hardware's roofline.
    decode_stride: most steps that one call of `schedule()` stands for; the results
        are the same whatever it is (`ttlcache_sim.strides.stride`).
    """

    hardware: str = option("a100-80", "a100-80, h100, h200 or b200.")
    model: str = option("llama-3.1-8b", "llama-3.1-8b, llama-3.1-70b or qwen3-32b.")
    blocks: int = option(24_000, "KV pool, in blocks.")
    block_size: int = option(16, "Tokens of a block.")
    max_num_seqs: int = option(256, "Most running requests.")
    max_num_batched_tokens: int = option(2048, "Most tokens of a step: the chunk size.")
    offload: str = option("none", "none, cpu:GB or cpu:GB+ssd:GB.")
    tell_last: bool = option(True, "Clients say which turn is their last one.")
    repeat_output: bool = option(True, "Prompts hold what the model put out before.")
    profile: Path | None = option(None, "Measured step times (bench profile).")
    decode_stride: int = option(1024, "Most steps simulated in one; 1: none.", min=1)

    @property
    def step_time(self) -> StepTime:
        if self.profile is not None:
            return load_profile(self.profile)
        return Roofline.of(HARDWARE[self.hardware], MODELS[self.model])

    @property
    def pool_tokens(self) -> int:
        """Tokens that fit; one block is vLLM's null block."""
        return (self.blocks - 1) * self.block_size

    @property
    def max_context(self) -> int:
        """A context must fit into the model and, alone, into the pool."""
        return min(MODELS[self.model].max_tokens, self.pool_tokens)


@dataclass(frozen=True, slots=True)
class FleetSetting:
    """Replicas behind a router."""

    replicas: int
    routing: str


@dataclass(frozen=True, slots=True)
class Cell:
    """Everything that determines a result. fleet: None for one engine alone."""

    arm: Arm
    engine: EngineSetting
    workload: WorkloadSpec
    fleet: FleetSetting | None = None

    @property
    def name(self) -> str:
        """Of the arm, and how turns find their replica."""
        return (
            f"{self.arm.name} @ {self.fleet.routing}" if self.fleet else self.arm.name
        )


@dataclass(frozen=True, slots=True)
class CellResult:
    """metrics: deterministic. wall: seconds of this machine, never compared.

    steady: `ttlcache_sim.metrics.Steady` as a dict, without warm-up and drain.
    """

    metrics: dict[str, Any]
    wall: dict[str, float]
    steady: dict[str, Any] = field(default_factory=dict)
