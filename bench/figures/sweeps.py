"""What the figures measure: sweeps of `bench sim` over one option.

Adding one: one entry in `SWEEPS`. Everything synthetic, so that anybody can rerun it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from bench.sim.options import SimOptions, cells_of
from bench.sim.settings import Cell, EngineSetting
from ttlcache import policies

MAIN_ARMS = "vllm,program-fcfs,continuum-public,cachettl,thunderagent,adaptive,oracle"
FEW_ARMS = "vllm,cachettl,adaptive"
PROGRAMS = 40
#: 384,000 tokens in blocks of 64: what an A100-80 has left beside the 8B weights.
ENGINE = EngineSetting(blocks=6_000, block_size=64)
BASE = SimOptions(programs=PROGRAMS, rate=0.05, engine=ENGINE)


@dataclass(frozen=True, slots=True)
class Sweep:
    """One figure. points: options by x value, in order of x."""

    name: str
    title: str
    source: str
    x: str
    points: Mapping[str, SimOptions]
    note: str = ""
    metrics: Sequence[str] = field(default=("mean_jct_s", "p90_jct_s", "p95_jct_s"))

    def cells(self) -> list[tuple[str, Cell]]:
        """All cells with their x."""
        return [
            (x, cell)
            for x, options in self.points.items()
            for cell in cells_of(options)
        ]


def _engine(**change: Any) -> SimOptions:
    return replace(BASE, arms=FEW_ARMS, engine=replace(ENGINE, **change))


def _loads(workload: str, rates: Sequence[float]) -> dict[str, SimOptions]:
    options = replace(BASE, workload=workload, arms=MAIN_ARMS)
    return {f"{rate:g}": replace(options, rate=rate) for rate in rates}


def ablation_arms() -> str:
    """From the paper's steps to ours, then ours with one idea less at a time.

    The ideas are the switches of the policy, whatever they are called today.
    """
    steps = ["vllm", "program-fcfs", "static-ttl", "cachettl", "adaptive"]
    steps.append('adaptive:{"admission": "none"}')
    for name, value in policies.create("adaptive").options.model_dump().items():
        if value is True:
            change = f'{{"policy_options": {{"{name}": false}}}}'
            steps.append(f"adaptive:{change}")
    return ",".join(steps)


_ALL = (
    Sweep(
        "load-swe",
        "JCT against load, SWE-bench-like",
        "paper, Fig. 8, 10 and 11",
        "programs/s",
        _loads("swe", (0.01, 0.02, 0.05)),
    ),
    Sweep(
        "load-bfcl",
        "JCT against load, BFCL-like",
        "paper, Fig. 8, 10 and 11",
        "programs/s",
        _loads("bfcl", (0.01, 0.02, 0.05)),
    ),
    Sweep(
        "batch",
        "Batch size",
        "paper, Fig. 13",
        "max_num_seqs",
        {str(n): _engine(max_num_seqs=n) for n in (4, 8, 16, 64, 256)},
    ),
    Sweep(
        "chunk",
        "Chunk size of prefill",
        "paper, Fig. 13",
        "max_num_batched_tokens",
        {str(n): _engine(max_num_batched_tokens=n) for n in (512, 2048, 8192)},
    ),
    Sweep(
        "turns",
        "Turns times 1 to 5 at constant tokens",
        "paper, Fig. 14",
        "turn scale",
        {str(n): replace(BASE, arms=FEW_ARMS, turn_scale=n) for n in (1, 2, 3, 5)},
    ),
    Sweep(
        "ssd",
        "Lower tiers",
        "paper, Fig. 15",
        "offload",
        {
            name: _engine(offload=name)
            for name in ("none", "cpu:20", "cpu:20+ssd:400", "cpu:20+ssd:800")
        },
        note="GB of one A100's host memory and of one NVMe drive.",
    ),
    Sweep(
        "ablation",
        "From vLLM to adaptive, then one idea less at a time",
        "paper, Fig. 16",
        "workload",
        {
            name: replace(BASE, workload=name, arms=ablation_arms())
            for name in ("swe", "bfcl")
        },
        note="A row `adaptive:{...}` is adaptive with that idea turned off.",
    ),
)
SWEEPS: dict[str, Sweep] = {sweep.name: sweep for sweep in _ALL}
