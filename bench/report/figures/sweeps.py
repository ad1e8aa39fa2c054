"""What the figures measure: sweeps of `bench sim` over one option.

Adding one: one entry in `SWEEPS`. Everything synthetic, so that anybody can rerun it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bench.report.figures.page import JCT_TABLES
from bench.sim.options import SimOptions, cells_of
from bench.sim.rivals.ablations import ABLATIONS
from bench.sim.settings import Cell, EngineSetting

MAIN_ARMS = (
    "vllm,program-fcfs,continuum-public,cachettl,ski-rental,infercept,thunderagent,"
    "adaptive,oracle"
)
FEW_ARMS = "vllm,cachettl,ski-rental,adaptive"
PROGRAMS = 40
#: 384,000 tokens in blocks of 64: what an A100-80 has left beside the 8B weights.
ENGINE = EngineSetting(blocks=6_000, block_size=64)
FULL_FLEET = 64
BASE = SimOptions(programs=PROGRAMS, rate=0.05, seeds=(0, 1), engine=ENGINE)

ROLLOUT = replace(
    BASE,
    workload="openhands",
    arrivals="rollout:64:90",
    programs=256,
    arms="vllm,thunderagent,cachettl,adaptive,program-fcfs",
)


@dataclass(frozen=True, slots=True)
class Sweep:
    """One figure. points: options by x value, in order of x.

    tables: metric, what the page calls it, digits; the first one is drawn.
    programs: of a cell, in words where points differ.
    """

    name: str
    title: str
    source: str
    x: str
    points: Mapping[str, SimOptions]
    note: str = ""
    tables: Sequence[tuple[str, str, int]] = JCT_TABLES
    programs: str = f"{PROGRAMS} programs a cell"

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


def _full_fleet(programs: int, replicas: int, seeds: int = 1) -> SimOptions:
    """Of 64 replicas at 0.83 programs a second, or a share of that."""
    return replace(
        BASE,
        arms="adaptive",
        programs=programs,
        rate=0.83 * replicas / FULL_FLEET,
        replicas=replicas,
        routing="session,sticky,cache-aware",
        seeds=tuple(range(seeds)),
    )


def ablation_arms() -> str:
    """From the paper's steps to ours, then ours with one idea less at a time.

    The ideas are those of the policy, and the room that new programs leave to those
    under way.
    """
    steps = ["vllm", "program-fcfs", "static-ttl", "cachettl", "adaptive"]
    steps += [f"adaptive:{name}" for name in ABLATIONS]
    steps.append('adaptive:{"admission": "none"}')
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
        note="GB of one A100's host memory and of one NVMe drive, written through "
        "(`demote: write-through`; a server's default is `on-pressure`).",
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
        note="A row `adaptive:...` is adaptive with one idea less, by its name in "
        "`bench/sim/rivals/ablations.py`, or with that setting. The numbers were "
        "measured before the switches became subclasses, when the fallback and lone "
        "reloads were still there, and not again since.",
    ),
    Sweep(
        "fleet-full",
        "64 replicas, 10,000 programs",
        "paper, §6.2",
        "replicas x programs",
        {
            "1 x 156": _full_fleet(156, 1, seeds=4),
            f"{FULL_FLEET} x 1,000": _full_fleet(1_000, FULL_FLEET),
            f"{FULL_FLEET} x 10,000": _full_fleet(10_000, FULL_FLEET),
        },
        note="0.83 programs a second for 64 replicas, arm `adaptive`; one replica has "
        "1/64 of the rate and of the programs, mean of 4 seeds. `session` is "
        "a hash of the id, as in vllm-router's `consistent_hash`; `sticky` starts a "
        "program where the fewest are.",
        tables=(
            ("mean_jct_s", "mean JCT, s", 1),
            ("p95_jct_s", "P95 JCT, s", 1),
            ("programs_per_s", "programs/s", 4),
            ("prompt_hit", "prompt hit", 3),
            ("load_imbalance", "busiest replica / mean", 2),
        ),
        programs="156, 1,000 or 10,000 programs a cell",
    ),
    Sweep(
        "rollout",
        "Reinforcement-learning rollouts, OpenHands-like",
        "paper, Table 5",
        "programs at once",
        {"64": ROLLOUT},
        note="Batches of 64; the next one starts, with new weights and an empty cache, "
        "when 90 % of this one have ended.",
        tables=(
            ("turns_per_min", "turns a minute", 1),
            ("time_to_90pct_s", "time to 90 % of all programs, s", 0),
            ("mean_jct_s", "mean JCT, s", 0),
        ),
        programs="256 programs",
    ),
)
SWEEPS: dict[str, Sweep] = {sweep.name: sweep for sweep in _ALL}
