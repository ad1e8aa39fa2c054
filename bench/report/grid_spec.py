"""The grid: which cells there are, and at what rate programs arrive in each.

    cell = workload x pool x load;   a run = a cell under one arm with one seed

Pools are counted in final contexts, so that a pool means the same for every workload:

    small      CONTEXTS["small"] mean final contexts, at least the longest one
    large      CONTEXTS["large"] of them
    offload    small, and a CPU tier of CPU_POOLS small pools

A load is a share of the capacity: programs that the best of `CAPACITY_ARMS` completes
a second while `CROWDS` times the pool's final contexts are always there, warm-up and
drain cut off. A new program starts whenever one ends, so an order that prefers short
ones completes no more of them than come. Measured once per workload and pool, cached
like any run.

First prompts begin with the same tokens, a system prompt and tools: as many as the
shortest of them has, the most that a log without texts allows.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench.command import CellRuns, one_of
from bench.sim.rivals.arms import ARMS, Arm
from bench.sim.settings import Cell, EngineSetting
from ttlcache.cli.command import option
from ttlcache_sim.load.programs import Program
from ttlcache_sim.load.workload import WorkloadSpec, build
from ttlcache_sim.steps.models import MODELS

SYNTHETIC = ("swe", "bfcl", "openhands")
TRACES = ("tb_mini_swe_agent", "weka_claude_code", "sweagent_java")
WORKLOADS = (*SYNTHETIC, *TRACES)
LOADS = (0.6, 0.8, 0.95, 1.1)
CONTEXTS = {"small": 4, "large": 12, "offload": 4}
CPU_POOLS = 2
#: Programs at a time that show the capacity, in final contexts of the pool: many tools
#: run for longer than the engine works, so twice is not enough everywhere.
CROWDS = (4, 12)
CAPACITY_ARMS = ("adaptive", "cachettl-strict")
CAPACITY_PROGRAMS = 150
#: Capacity and mean contexts come from programs that no cell replays.
CAPACITY_SEED = 1000
#: Of the programs that are counted, so many more come before and after them.
WARM_UP, DRAIN = 0.2, 0.14
#: First seed by half: what is tuned on `odd` is reported on `even`.
FIRST_SEEDS = {"odd": 100, "even": 0}
#: Of these every arm has a run; percentiles are theirs.
MIN_SEEDS = 2
GRID_ARMS = (
    *("vllm", "autellix", "infercept", "continuum-public"),
    *("cachettl", "cachettl-paper", "cachettl-strict"),
    *("thunderagent", "session-lease", "adaptive", "oracle"),
)
#: Larger blocks than vLLM's 16 make a run three times cheaper and change little.
ENGINE = EngineSetting(block_size=64)


@dataclass(frozen=True, slots=True)
class GridOptions(CellRuns):
    """Which cells, and how well each is known.

    traces: folder of the trace files. half: lines of the traces that are used.
    """

    traces: Path = option(Path("traces"), "Folder of the trace files.")
    workloads: tuple[str, ...] = option(
        tuple(name for name in WORKLOADS if name != "openhands"),
        f"Of {', '.join(WORKLOADS)}; 50 turns each make openhands slow.",
    )
    pools: tuple[str, ...] = option(("small", "offload"), f"Of {', '.join(CONTEXTS)}.")
    loads: tuple[float, ...] = option(LOADS, "Shares of the capacity.")
    arms: str = option(",".join(GRID_ARMS), "As for sim.")
    half: str = option("even", "Lines of the traces: tune on odd, report on even.")
    programs: int = option(150, "Programs that are counted in a run.", min=2)
    seeds: int = option(4, f"Most seeds of an arm in a cell; {MIN_SEEDS} at least.")
    tell_last: bool = option(True, "Clients say which turn is their last one.")
    shared_head: bool = option(True, "First prompts begin alike: system prompt, tools.")
    smoke: bool = option(False, "Ten minutes: two workloads, two loads, six arms.")


#: What `--smoke` stands for.
SMOKE = {
    "workloads": ("swe", "bfcl"),
    "pools": ("small",),
    "loads": (0.8, 1.1),
    "arms": "vllm,cachettl,cachettl-paper,cachettl-strict,adaptive,oracle",
    "seeds": MIN_SEEDS,
}


@dataclass(frozen=True, slots=True)
class Place:
    """A workload on a pool."""

    workload: str
    pool: str
    engine: EngineSetting
    spec: WorkloadSpec  # rate and seed are to be set


@dataclass(frozen=True, slots=True)
class Point:
    """A cell of the grid. rate, capacity: programs a second."""

    place: Place
    load: float
    capacity: float
    first_seed: int

    @property
    def rate(self) -> float:
        """Of four digits: one that can be typed gives the same cell."""
        return float(f"{self.load * self.capacity:.4g}")

    def run(self, arm: Arm, number: int) -> Cell:
        """The cell under that arm with its `number`th seed."""
        seed = self.first_seed + number
        spec = replace(self.place.spec, rate=self.rate, seed=seed)
        return Cell(arm, self.place.engine, spec)


def places(options: GridOptions) -> list[Place]:
    """Workloads x pools.

    Raises:
        ValueError: unknown names; a trace that is not there.
    """
    for what, given, known in (
        ("workload", options.workloads, WORKLOADS),
        ("pool", options.pools, CONTEXTS),
        ("half", [options.half], FIRST_SEEDS),
    ):
        for name in given:
            one_of(what, name, known)
    if not options.loads or min(options.loads) <= 0:
        raise ValueError(f"loads {options.loads}: expected positive numbers")
    return [
        _place(options, w, pool) for w in options.workloads for pool in options.pools
    ]


def capacity_runs(place: Place) -> list[Cell]:
    """The closed loops that show the capacity of a place."""
    mean, _ = _final_contexts(place.spec)
    contexts = place.engine.pool_tokens / mean
    cells = []
    for crowd in (round(times * contexts) for times in CROWDS):
        spec = replace(
            place.spec,
            seed=CAPACITY_SEED,
            programs=CAPACITY_PROGRAMS + 2 * crowd,
            arrivals=f"closed:{crowd}",
            warm_up=crowd,
            drain=crowd,
        )
        cells += [Cell(ARMS[arm], place.engine, spec) for arm in CAPACITY_ARMS]
    return cells


def points(
    options: GridOptions, where: Sequence[Place], capacities: Sequence[float]
) -> list[Point]:
    """Places x loads. capacities: programs a second, one per place."""
    return [
        Point(place, load, capacity, FIRST_SEEDS[options.half])
        for place, capacity in zip(where, capacities, strict=True)
        for load in options.loads
    ]


def _place(options: GridOptions, workload: str, pool: str) -> Place:
    name, half = workload, ""
    if workload in TRACES:
        path = options.traces / f"{workload}.jsonl.gz"
        if not path.exists():
            raise ValueError(
                f"trace {path} is not there: name its folder with --traces, or only "
                f"synthetic workloads ({', '.join(SYNTHETIC)}) with --workloads"
            )
        name, half = f"trace:{path}", options.half
    warm_up, drain = (math.ceil(share * options.programs) for share in (WARM_UP, DRAIN))
    programs = warm_up + options.programs + drain
    spec = WorkloadSpec(
        name, programs, rate=1.0, seed=0, half=half, warm_up=warm_up, drain=drain
    )
    if options.shared_head:
        spec = replace(spec, shared_tokens=_shortest_first_prompt(spec))
    mean, longest = _final_contexts(spec)
    tokens = max(CONTEXTS[pool] * mean, 1.1 * longest)
    blocks = math.ceil(tokens / ENGINE.block_size) + 1
    offload = "none"
    if pool == "offload":
        pool_bytes = tokens * MODELS[ENGINE.model].kv_bytes_per_token
        offload = f"cpu:{CPU_POOLS * pool_bytes / 1e9:.0f}"
    engine = replace(
        ENGINE, blocks=blocks, offload=offload, tell_last=options.tell_last
    )
    return Place(workload, pool, engine, replace(spec, max_context=engine.max_context))


def _final_contexts(spec: WorkloadSpec) -> tuple[float, int]:
    """Mean and longest final context in tokens; the rate does not matter."""
    sizes = [program.context_tokens for program in _sample(spec)]
    return statistics.fmean(sizes), max(sizes)


def _shortest_first_prompt(spec: WorkloadSpec) -> int:
    """The most that all first prompts can have in common, in tokens."""
    return min(program.turns[0].new_prompt_tokens for program in _sample(spec))


def _sample(spec: WorkloadSpec) -> tuple[Program, ...]:
    return build(replace(spec, seed=CAPACITY_SEED, programs=200)).programs
