"""What the figures measure: sweeps of `bench sim` over one option.

Adding one: one entry in `SWEEPS`. Everything synthetic, so that anybody can rerun it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from bench.report.figures import shapes
from bench.sim.options import SimOptions, cells_of
from bench.sim.rivals.ablations import ABLATIONS
from bench.sim.settings import Cell, EngineSetting

MAIN_ARMS = (
    "vllm,program-fcfs,continuum-public,cachettl,ski-rental,infercept,thunderagent,"
    "adaptive,oracle"
)
FEW_ARMS = "vllm,cachettl,cachettl-strict,ski-rental,adaptive"
#: Those of the paper's own figures, without a lower tier and with one.
PAPER_ARMS = "vllm,autellix,cachettl,cachettl-strict,adaptive"
TIER_ARMS = "vllm,autellix,infercept,cachettl,cachettl-strict,adaptive"
PROGRAMS = 40
#: 384,000 tokens in blocks of 64: what an A100-80 has left beside the 8B weights.
ENGINE = EngineSetting(blocks=6_000, block_size=64)
BASE = SimOptions(programs=PROGRAMS, rate=0.05, seeds=(0, 1), engine=ENGINE)

ROLLOUT = replace(
    BASE,
    workload="openhands",
    arrivals="rollout:64:90",
    programs=256,
    arms="vllm,thunderagent,cachettl,adaptive,program-fcfs",
)


@dataclass(frozen=True, slots=True)
class Platform:
    """Of the paper's Fig. 8 and 10.

    engine: pool of what 0.9 of the memory has left beside the weights, as on the A100.
    speed: in A100s, by FLOP/s and size of the model. dram: as the paper's, all GPUs'.
    """

    name: str
    engine: EngineSetting
    speed: float
    dram: str


def _gpu(hardware: str, blocks: int, **change: Any) -> EngineSetting:
    return replace(ENGINE, hardware=hardware, blocks=blocks, **change)


B200 = _gpu("b200", 16_700)
#: The paper's, but for its Gemma-3-12B: sliding windows are not modelled.
PLATFORMS = (
    Platform("8B A100", ENGINE, 1.0, "cpu:100"),
    Platform("8B H100", _gpu("h100", 6_000), 3.2, "cpu:200"),
    Platform("8B B200", B200, 7.2, "cpu:200"),
    Platform("70B 4xB200", _gpu("b200", 23_000, model="llama-3.1-70b"), 2.8, "cpu:800"),
)
#: Programs of a cell on larger pools than the A100's.
_MANY = 80


@dataclass(frozen=True, slots=True)
class Sweep:
    """One figure. points: options by x value, in order of x.

    drawn: metric on the y axis, and what it is called. kept: more metrics.
    programs: of a cell, in words.
    made: the rows, where nothing is simulated.
    """

    name: str
    title: str
    x: str
    points: Mapping[str, SimOptions] = field(default_factory=dict)
    drawn: tuple[str, str] = ("mean_jct_s", "mean JCT, s")
    kept: Sequence[str] = ()
    programs: str = f"{PROGRAMS} programs a cell"
    made: Callable[[], list[dict[str, Any]]] | None = None

    def cells(self) -> list[tuple[str, Cell]]:
        """All cells with their x."""
        return [
            (x, cell)
            for x, options in self.points.items()
            for cell in cells_of(options)
        ]

    @property
    def roofline(self) -> str:
        """The hardware whose step times are computed from its peaks, not measured."""
        engines = [options.engine for options in self.points.values()]
        return ", ".join(dict.fromkeys(e.hardware for e in engines if not e.profile))


def _engine(**change: Any) -> SimOptions:
    return replace(BASE, arms=FEW_ARMS, engine=replace(ENGINE, **change))


def _loads(workload: str, rates: Sequence[float]) -> dict[str, SimOptions]:
    options = replace(BASE, workload=workload, arms=MAIN_ARMS)
    return {f"{rate:g}": replace(options, rate=rate) for rate in rates}


def _platforms(
    rates: Iterable[float], *, dram: bool = False, arms: str = PAPER_ARMS
) -> dict[str, SimOptions]:
    """rates: programs a second for each A100 that a platform is as fast as."""
    return {
        f"{platform.name} {workload} {rate * platform.speed:.2g}/s": replace(
            BASE,
            arms=arms,
            workload=workload,
            programs=_MANY,
            rate=rate * platform.speed,
            seeds=(0,),
            engine=replace(platform.engine, offload=platform.dram if dram else "none"),
        )
        for platform in PLATFORMS
        for workload in ("swe", "bfcl")
        for rate in rates
    }


def _b200(rate: float, offload: str, programs: int = _MANY) -> SimOptions:
    return replace(
        BASE,
        arms=TIER_ARMS,
        programs=programs,
        rate=rate,
        seeds=(0,),
        engine=replace(B200, offload=offload),
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
        "workload",
        "Tokens still to come",
        "steps made",
        drawn=("tokens_left", "tokens, mean"),
        programs="2,000 drawn programs",
        made=shapes.tokens_left,
    ),
    Sweep(
        "load-swe",
        "JCT against load, SWE-bench-like",
        "programs/s",
        _loads("swe", (0.01, 0.02, 0.05)),
    ),
    Sweep(
        "load-bfcl",
        "JCT against load, BFCL-like",
        "programs/s",
        _loads("bfcl", (0.01, 0.02, 0.05)),
    ),
    Sweep(
        "platforms",
        "Models and GPUs",
        "platform, workload, programs/s",
        _platforms((0.02, 0.05)),
        programs=f"{_MANY} programs a cell",
    ),
    Sweep(
        "openhands",
        "JCT against load, OpenHands-like, H100",
        "programs/s",
        {
            f"{rate:g}": replace(
                BASE,
                workload="openhands",
                arms=PAPER_ARMS,
                rate=rate,
                seeds=(0,),
                engine=_gpu("h100", 6_000),
            )
            for rate in (0.03, 0.06, 0.12)
        },
    ),
    Sweep(
        "platforms-dram",
        "Models and GPUs above host memory",
        "platform, workload, programs/s",
        _platforms((0.05,), dram=True, arms=TIER_ARMS),
        programs=f"{_MANY} programs a cell",
    ),
    Sweep(
        "dram",
        "Host memory by load, SWE-bench-like, B200",
        "GB, programs/s",
        {
            f"{gb} GB {rate:g}/s": _b200(rate, f"cpu:{gb}")
            for rate in (0.36, 0.72)
            for gb in (100, 200, 400)
        },
        drawn=("p95_jct_s", "P95 JCT, s"),
        programs=f"{_MANY} programs a cell",
    ),
    Sweep(
        "batch",
        "Batch size",
        "max_num_seqs",
        {str(n): _engine(max_num_seqs=n) for n in (4, 8, 16, 64, 256)},
    ),
    Sweep(
        "chunk",
        "Chunk size of prefill",
        "max_num_batched_tokens",
        {str(n): _engine(max_num_batched_tokens=n) for n in (512, 2048, 8192)},
    ),
    Sweep(
        "turns",
        "Turns times 1 to 5 at constant tokens",
        "turn scale",
        {str(n): replace(BASE, arms=FEW_ARMS, turn_scale=n) for n in (1, 2, 3, 5)},
    ),
    Sweep(
        "ssd",
        "Disk below 200 GB of host memory, B200",
        "GB of disk",
        # So many at once that their contexts, 0.8 TB on average, outgrow 400 GB.
        {
            str(gb): _b200(1.0, f"cpu:200+ssd:{gb}", programs=2 * _MANY)
            for gb in (400, 800)
        },
        programs=f"{2 * _MANY} programs a cell",
    ),
    Sweep(
        "ablation",
        "From vLLM to adaptive, then one idea less at a time",
        "workload",
        {
            name: replace(BASE, workload=name, arms=ablation_arms())
            for name in ("swe", "bfcl")
        },
    ),
    Sweep(
        "rollout",
        "Reinforcement-learning rollouts, OpenHands-like",
        "programs at once",
        {"64": ROLLOUT},
        drawn=("turns_per_min", "turns a minute"),
        kept=("time_to_90pct_s",),
        programs="256 programs",
    ),
    Sweep(
        "tool-means",
        "Mean of so many calls of a tool",
        "calls",
        drawn=("error_95", "95 % are within this share of the truth"),
        programs="300 draws",
        made=shapes.tool_means,
    ),
)
SWEEPS: dict[str, Sweep] = {sweep.name: sweep for sweep in _ALL}
