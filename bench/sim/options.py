"""`python -m bench sim`: its options, and what they mean."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from bench.sim import report, run
from bench.sim.fleet.routing import ROUTERS
from bench.sim.hardware import HARDWARE
from bench.sim.load.feed import parse_loop
from bench.sim.load.workload import WorkloadSpec
from bench.sim.models import MODELS
from bench.sim.rivals.arms import Arm, parse_arms
from bench.sim.settings import Cell, EngineSetting, FleetSetting
from bench.sim.tiers.offload import parse_offload

DEFAULT_ARMS = "vllm,program-fcfs,static-ttl,cachettl,adaptive"


@dataclass(frozen=True, slots=True)
class SimOptions:
    """The reference cell by default."""

    workload: str = "swe"
    arms: str = DEFAULT_ARMS
    programs: int = 60
    rate: float = 0.05
    seeds: str = "0"
    arrivals: str = "poisson"
    turn_scale: int = 1
    half: str = ""
    chat: str = ""
    chat_rate: float = 0.0
    shared_tokens: int = 0
    replicas: int = 1
    routing: str = "session"
    fail_s: float = 0.0
    engine: EngineSetting = field(default_factory=EngineSetting)
    processes: int = 2
    use_cache: bool = True


#: Small enough for a minute on two cores, large enough that arms differ.
SMOKE = SimOptions(
    programs=10,
    rate=0.05,
    engine=EngineSetting(blocks=8_000),
    use_cache=False,
)


def cells_of(options: SimOptions) -> list[Cell]:
    """Arms x seeds.

    Raises:
        ValueError: an option with a value that means nothing.
    """
    engine = options.engine
    _known("hardware", engine.hardware, HARDWARE)
    _known("model", engine.model, MODELS)
    parse_offload(engine.offload)
    if options.half not in ("", "odd", "even"):
        raise ValueError(f"half {options.half!r}: expected odd or even")
    if options.half and not options.workload.startswith("trace:"):
        raise ValueError("half: only traces have lines")
    try:
        seeds = [int(seed) for seed in options.seeds.split(",")]
    except ValueError:
        raise ValueError(f"seeds {options.seeds!r}: expected 0,1,2") from None
    arms = parse_arms(options.arms)
    return [
        Cell(arm, engine, _workload(options, seed), fleet)
        for arm in arms
        for fleet in _fleets(options, arms)
        for seed in seeds
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
        if options.fail_s:
            raise ValueError("fail-at-s: a fleet of one would be gone")
        return [None]
    if options.engine.offload != "none" or loop is not None or options.chat:
        raise ValueError("replicas: not modelled with offload, loops or chats")
    gated = [arm.name for arm in arms if arm.gate]
    if gated:
        raise ValueError(f"replicas: not modelled for {', '.join(gated)}")
    names = [name.strip() for name in options.routing.split(",")]
    for name in names:
        _known("routing", name, ROUTERS)
    return [FleetSetting(options.replicas, name, options.fail_s) for name in names]


def _workload(options: SimOptions, seed: int) -> WorkloadSpec:
    return WorkloadSpec(
        name=options.workload,
        programs=options.programs,
        rate=options.rate,
        seed=seed,
        arrivals=options.arrivals,
        turn_scale=options.turn_scale,
        half=options.half,
        chat=options.chat,
        chat_rate=options.chat_rate,
        shared_tokens=options.shared_tokens,
        max_context=options.engine.max_context,
    )


def run_sim(options: SimOptions, out: Path | None, console: Console) -> None:
    """Run, print the table, write the results and, beside them, the wall times.

    Raises:
        ValueError, RuntimeError: bad options; a cell that failed.
    """
    cells = cells_of(options)
    results = run.run_cells(
        cells,
        processes=options.processes,
        cache=run.CACHE if options.use_cache else None,
        console=console,
    )
    # Redirected output is 80 columns wide to rich: numbers would be cut.
    wide = Console(width=max(console.width, report.MIN_WIDTH), file=console.file)
    wide.print(report.table(cells, results))
    if out is None:
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(run.to_json(cells, results) + "\n")
    wall = {
        run.label(cell): result.wall
        for cell, result in zip(cells, results, strict=True)
    }
    out.with_suffix(".wall.json").write_text(json.dumps(wall, indent=1) + "\n")


def _known(what: str, value: str, known: Mapping[str, object]) -> None:
    if value not in known:
        raise ValueError(f"{what} {value!r}: expected one of {', '.join(known)}")
