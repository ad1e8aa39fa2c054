"""What a cell is: plain data, hashable, picklable, JSON-able."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ttlcache_sim.arm import Arm
from ttlcache_sim.load.workload import WorkloadSpec
from ttlcache_sim.steps.hardware import HARDWARE
from ttlcache_sim.steps.models import MODELS
from ttlcache_sim.steps.profile import load_profile
from ttlcache_sim.steps.steptime import Roofline, StepTime


@dataclass(frozen=True, slots=True)
class EngineSetting:
    """The engine of a cell; `blocks` of `block_size` tokens.

    hardware, model: keys of `HARDWARE` and `MODELS`.
    max_num_seqs: most running requests. max_num_batched_tokens: of a step.
    offload: see `ttlcache_sim.tiers.offload`.
    tell_last: whether clients say which turn is their last one.
    repeat_output: whether prompts hold earlier outputs, or other text in their place.
    profile: step times of a real server, in place of the hardware's roofline.
    decode_stride: most steps that one call of `schedule()` stands for; the results
        are the same whatever it is (`ttlcache_sim.strides.stride`).
    """

    hardware: str
    model: str
    blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    offload: str = "none"
    tell_last: bool = True
    repeat_output: bool = True
    profile: Path | None = None
    decode_stride: int = 1024

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
class Cell:
    """Everything that determines a result."""

    arm: Arm
    engine: EngineSetting
    workload: WorkloadSpec

    @property
    def name(self) -> str:
        """Of the arm."""
        return self.arm.name


@dataclass(frozen=True, slots=True)
class CellResult:
    """metrics: deterministic. wall: seconds of this machine, never compared.

    steady: `ttlcache_sim.metrics.Steady` as a dict, without warm-up and drain.
    """

    metrics: dict[str, Any]
    wall: dict[str, float]
    steady: dict[str, Any] = field(default_factory=dict)
