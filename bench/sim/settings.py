"""Cells of rivals, and the engine as options of a command line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bench.sim.rivals.arms import Arm
from ttlcache.cli.command import option
from ttlcache_sim import settings


@dataclass(frozen=True, slots=True)
class EngineSetting(settings.EngineSetting):
    """That of the reference cell by default."""

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


@dataclass(frozen=True, slots=True)
class Cell(settings.Cell):
    """A cell whose arm may be a rival."""

    arm: Arm
