"""The options of `python -m bench sim`, and what they mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.command import CellRuns, one_of, option
from bench.sim.fleet.routing import ROUTERS
from bench.sim.rivals.arms import Arm, parse_arms
from bench.sim.settings import Cell, EngineSetting, FleetSetting
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
    replicas: int = option(1, "Engines behind a router.", min=1)
    routing: str = option("session", "session, sticky, cache-aware; a,b,…")
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
    arms = parse_arms(options.arms)
    return [
        Cell(arm, engine, _workload(options, seed), fleet)
        for arm in arms
        for fleet in _fleets(options, arms)
        for seed in options.seeds
    ]


def _fleets(options: SimOptions, arms: Sequence[Arm]) -> list[FleetSetting | None]:
    """One a way of routing; none for an engine alone.

    Raises:
        ValueError: what is not modelled for fleets.
    """
    loop = parse_loop(options.arrivals)
    if loop is not None and loop.share and options.engine.offload != "none":
        raise ValueError("rollout: not modelled with a lower tier")
    if options.replicas == 1:
        return [None]
    if options.engine.offload != "none" or loop is not None:
        raise ValueError("replicas: not modelled with offload or loops")
    gated = [arm.name for arm in arms if arm.gate]
    if gated:
        raise ValueError(f"replicas: not modelled for {', '.join(gated)}")
    names = [name.strip() for name in options.routing.split(",")]
    for name in names:
        one_of("routing", name, ROUTERS)
    return [FleetSetting(options.replicas, name) for name in names]


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
