"""The options of `python -m bench sim`, and what they mean."""

from __future__ import annotations

from dataclasses import dataclass, field

from bench.command import CellRuns, one_of
from bench.sim.rivals.arms import parse_arms
from bench.sim.settings import Cell, EngineSetting
from ttlcache.cli.command import option
from ttlcache_sim.load.feed import parse_loop
from ttlcache_sim.load.workload import WorkloadSpec
from ttlcache_sim.steps.hardware import HARDWARE
from ttlcache_sim.steps.models import MODELS
from ttlcache_sim.tiers.offload import parse_offload

DEFAULT_ARMS = "vllm,program-fcfs,static-ttl,cachettl,adaptive"


@dataclass(frozen=True, slots=True)
class SimOptions(CellRuns):
    """The reference cell by default."""

    workload: str = option("swe", "swe, bfcl, openhands, or trace:PATH.")
    arms: str = option(
        DEFAULT_ARMS, 'a,b,…; an arm may be varied: NAME:{"key": value}.'
    )
    programs: int = option(60, "How many agents.")
    rate: float = option(0.05, "Agent arrivals a second.")
    seeds: tuple[int, ...] = option((0,), "0,1,2")
    arrivals: str = option(
        "poisson",
        "poisson, closed:N, or rollout:N:K: batches of N, the next one when K % "
        "have ended, the cache emptied in between.",
    )
    turn_scale: int = option(1, "Turns times this, at constant tokens.")
    half: str = option("", "odd or even: only those lines of a trace.")
    engine: EngineSetting = field(default_factory=EngineSetting)


def cells_of(options: SimOptions) -> list[Cell]:
    """Arms x seeds.

    Raises:
        ValueError: an option with a value that means nothing.
    """
    engine = options.engine
    one_of("hardware", engine.hardware, HARDWARE)
    one_of("model", engine.model, MODELS)
    parse_offload(engine.offload)
    one_of("half", options.half, ("", "odd", "even"))
    if options.half and not options.workload.startswith("trace:"):
        raise ValueError("half: only traces have lines")
    loop = parse_loop(options.arrivals)
    if loop is not None and loop.share and engine.offload != "none":
        raise ValueError("rollout: not modelled with a lower tier")
    return [
        Cell(arm, engine, _workload(options, seed))
        for arm in parse_arms(options.arms)
        for seed in options.seeds
    ]


def _workload(options: SimOptions, seed: int) -> WorkloadSpec:
    return WorkloadSpec(
        name=options.workload,
        programs=options.programs,
        rate=options.rate,
        seed=seed,
        arrivals=options.arrivals,
        turn_scale=options.turn_scale,
        half=options.half,
        max_context=options.engine.max_context,
    )
