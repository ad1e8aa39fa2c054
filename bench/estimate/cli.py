"""`python -m bench estimate`: will it help me?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec

from rich.console import Console
from rich.markup import escape

from bench.command import write_json
from bench.estimate.plan import EstimateOptions, Plan, plan_of, rates_of
from bench.estimate.sessions import Sessions, read_sessions, save_trace
from bench.estimate.verdict import COLUMNS, Load, loads_of, rows, verdict
from bench.ratios import BLOCK_PROGRAMS, MIN_BLOCKS
from bench.sim import run
from bench.sim.settings import Cell
from bench.tables import table
from ttlcache_sim.load.workload import build
from ttlcache_sim.settings import CellResult

PROCESSES = 2
_TRACES = run.CACHE.parent / "estimate"


def estimate(options: EstimateOptions, console: Console) -> None:
    """Your own sessions in vLLM's scheduler, with and without ttlcache: no GPU."""
    sessions = read_sessions(options.paths, Console(stderr=True))
    if sessions.mean_turns == 1.0:
        console.print("It will not help: every program of these logs has one turn.")
        return
    plan = plan_of(options, sessions, save_trace(sessions.programs, _TRACES))
    capacity = 0.0
    if not options.rate:
        found = _run(plan.capacity_cells(sessions.mean_context_tokens))
        capacity = max(result.steady["programs_per_s"] for result in found)
    rates = rates_of(options, capacity)
    loads = loads_of(rates, _run(plan.cells(rates)))
    console.print(table(_title(options, plan), COLUMNS, rows(loads), left=2))
    told = [*verdict(loads, sessions), *_caveats(options, plan, sessions, capacity)]
    told.append(_draw(options, loads))
    for line in told:
        console.print(escape(line), highlight=False)
    numbers = {"loads": [asdict(load) for load in loads], "told": told}
    write_json(options.out / "estimate.json", numbers)


def _run(cells: Sequence[Cell]) -> list[CellResult]:
    return run.run_cells(cells, processes=PROCESSES)


def _title(options: EstimateOptions, plan: Plan) -> str:
    tokens = plan.engine.pool_tokens
    return f"{options.model} on {options.gpu}, KV pool of {tokens:,} tokens"


def _caveats(
    options: EstimateOptions, plan: Plan, sessions: Sessions, capacity: float
) -> Sequence[str]:
    found = [*sessions.notes]
    if options.profile:
        found.append(f"step times: measured, {options.profile}")
    else:
        found.append(f"step times: a roofline of {options.gpu}, not measured")
    if capacity:
        found.append(
            f"loads: 0.5, 0.8 and 1.1 of the capacity, {capacity:.3g} programs/s"
        )
    programs = plan.spec.programs
    if programs < len(sessions.programs):
        found.append(f"each run draws {programs} of them")
    found += filter(None, [build(plan.spec).caveat])
    if 2 * -(-plan.counted // BLOCK_PROGRAMS) < MIN_BLOCKS:
        found.append(f"no interval: {plan.counted} programs counted a run are too few")
    return found


def _draw(options: EstimateOptions, loads: Sequence[Load]) -> str:
    if find_spec("matplotlib") is None:
        return "no picture without matplotlib: pip install 'ttlcache[plot]'"
    from bench.estimate.picture import draw

    path = options.out / "estimate.png"
    draw(loads, path)
    return f"picture: {path}"
