"""The grid: which cells there are, and at what rate programs arrive in each.

    cell = workload x pool x load;   a row = a cell under one arm with one seed

Pools are counted in final contexts, so that a pool means the same for every workload:

    small      CONTEXTS["small"] mean final contexts, at least the longest one
    large      CONTEXTS["large"] of them
    offload    small, and a CPU tier of CPU_POOLS small pools

A load is a multiple of plain vLLM's saturation: the most programs a second that it
sustains, however many are let in at a time. That is the largest N / mean JCT (Little's
law) of closed loops of N programs, `CROWDS` times the final contexts of the pool
(no connector, no tier, a seed of its own). With more programs than that contexts
evict each other and throughput falls, to a third of it in places: at a rate taken from
there little is short. Measured once per workload and pool, cached like any cell.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from bench.command import CellRuns, one_of, option
from bench.sim.load.workload import WorkloadSpec, build
from bench.sim.models import MODELS
from bench.sim.rivals.arms import ARMS, Arm, parse_arms
from bench.sim.settings import Cell, EngineSetting

SYNTHETIC = ("swe", "bfcl", "openhands")
TRACES = ("tb_mini_swe_agent", "weka_claude_code", "sweagent_java")
WORKLOADS = (*SYNTHETIC, *TRACES)
LOADS = {"half": 0.5, "one": 1.0, "two": 2.0}
POOLS = ("small", "large", "offload")
CONTEXTS = {"small": 4, "large": 12, "offload": 4}
CPU_POOLS = 2
#: Programs in flight of the closed loops, in final contexts of the pool: throughput
#: peaks at one to one and a half (two where tools are slow) and has fallen at three.
CROWDS = (1.0, 1.5, 2.0)
#: Programs of a cell: enough that a pool is filled several times over.
PROGRAMS = {"small": 32, "large": 72, "offload": 32}
#: Of that, where a program has several times the turns of the others': still more turns
#: in a cell than anywhere else.
SHARE_OF_PROGRAMS = {"openhands": 0.5}
#: Variants are compared in docs/research/policy-log.md, and are no rivals.
GRID_ARMS = tuple(arm for arm in ARMS if not arm.startswith(("adaptive-", "cachettl-")))
#: Saturation and mean contexts come from programs that no cell replays.
PROBE_SEED = 1000
#: At least so many programs in a closed loop: few would be its start and its end.
PROBE_PROGRAMS = 24
#: Seeds by half: what is tuned on `odd` is reported on `even`.
SEEDS = {"odd": (100, 101), "even": (0, 1)}
#: Larger blocks than vLLM's 16 make a cell three times cheaper and change little.
ENGINE = EngineSetting(block_size=64)


@dataclass(frozen=True, slots=True)
class GridOptions(CellRuns):
    """Which cells.

    traces: folder of the trace files. half: lines of the traces that are used.
    programs: factor on `PROGRAMS`. seeds: empty for those of the half.
    """

    traces: Path = option(Path("traces"), "Folder of the trace files.")
    workloads: tuple[str, ...] = option(
        WORKLOADS, ",".join(WORKLOADS), show_default=False
    )
    pools: tuple[str, ...] = option(POOLS, ",".join(POOLS), show_default=False)
    loads: tuple[str, ...] = option(
        tuple(LOADS), f"{','.join(LOADS)}, of vLLM's saturation.", show_default=False
    )
    arms: str = option(
        ",".join(GRID_ARMS), "As for sim; all by default.", show_default=False
    )
    half: str = option("even", "Lines of the traces: tune on odd, report on even.")
    seeds: tuple[int, ...] = option((), "0,1 for even, 100,101 for odd.")
    programs: float = option(1.0, "Factor on the number of programs.", min=0.01)
    tell_last: bool = option(True, "Clients say which turn is their last one.")

    def seed_list(self) -> list[int]:
        """Those of the half where none are given."""
        return list(self.seeds or SEEDS[self.half])


@dataclass(frozen=True, slots=True)
class Place:
    """A workload on a pool."""

    workload: str
    pool: str
    engine: EngineSetting
    spec: WorkloadSpec  # rate and seed are to be set


@dataclass(frozen=True, slots=True)
class Point:
    """A cell of the grid; `cells` by arm, one per seed."""

    workload: str
    pool: str
    load: str
    rate: float
    engine: EngineSetting
    cells: Mapping[str, Sequence[Cell]] = field(default_factory=dict)


def places(options: GridOptions) -> list[Place]:
    """Workloads x pools.

    Raises:
        ValueError: unknown names; a trace that is not there.
    """
    for what, given, known in (
        ("workload", options.workloads, WORKLOADS),
        ("pool", options.pools, POOLS),
        ("load", options.loads, LOADS),
        ("half", [options.half], SEEDS),
    ):
        for name in given:
            one_of(what, name, known)
    return [
        _place(options, w, pool) for w in options.workloads for pool in options.pools
    ]


def probes(place: Place) -> dict[int, Cell]:
    """The closed loops that show the saturation of a place, by programs in flight."""
    engine = replace(place.engine, offload="none")
    return {
        crowd: Cell(ARMS["vllm"], engine, _closed(place.spec, crowd))
        for crowd in crowds_of(place)
    }


def saturation(mean_jct_s: Mapping[int, float]) -> float:
    """Programs/s. mean_jct_s: of the closed loops, by programs in flight."""
    return max(crowd / jct_s for crowd, jct_s in mean_jct_s.items())


def crowds_of(place: Place) -> list[int]:
    """Programs in flight of a place's closed loops."""
    mean, _ = _final_contexts(place.spec)
    contexts = place.engine.pool_tokens / mean
    return sorted({max(2, round(crowd * contexts)) for crowd in CROWDS})


def _closed(spec: WorkloadSpec, crowd: int) -> WorkloadSpec:
    programs = max(PROBE_PROGRAMS, 3 * crowd)
    return replace(spec, seed=PROBE_SEED, programs=programs, arrivals=f"closed:{crowd}")


def points(
    options: GridOptions, where: Sequence[Place], saturation: Sequence[float]
) -> list[Point]:
    """Places x loads with their cells. saturation: programs/s, one per place."""
    arms = parse_arms(options.arms)
    return [
        _point(options, place, load, per_s, arms)
        for place, per_s in zip(where, saturation, strict=True)
        for load in options.loads
    ]


def _point(
    options: GridOptions, place: Place, load: str, per_s: float, arms: Sequence[Arm]
) -> Point:
    # Four digits: a rate that can be typed gives the same cell.
    rate = float(f"{LOADS[load] * per_s:.4g}")
    cells = {
        arm.name: [
            Cell(arm, place.engine, replace(place.spec, rate=rate, seed=seed))
            for seed in options.seed_list()
        ]
        for arm in arms
    }
    return Point(place.workload, place.pool, load, rate, place.engine, cells)


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
    share = options.programs * SHARE_OF_PROGRAMS.get(workload, 1.0)
    programs = max(4, round(share * PROGRAMS[pool]))
    spec = WorkloadSpec(name, programs, rate=1.0, seed=0, half=half)
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
    sample = replace(spec, seed=PROBE_SEED, programs=200)
    sizes = [program.context_tokens for program in build(sample).programs]
    return statistics.fmean(sizes), max(sizes)
