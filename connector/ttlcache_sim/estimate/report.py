"""From logs to a table, a verdict, a picture and a file of numbers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ttlcache_sim import pool
from ttlcache_sim.bootstrap import BLOCK_PROGRAMS
from ttlcache_sim.estimate.plan import EstimateOptions, Plan, plan_of, rates_of
from ttlcache_sim.estimate.sessions import Sessions, read_sessions, save_trace
from ttlcache_sim.estimate.verdict import (
    COLUMNS,
    Load,
    block_programs,
    loads_of,
    rows,
    verdict,
)
from ttlcache_sim.load.workload import build
from ttlcache_sim.steps.models import MODELS

PROCESSES = 2
#: docs/research/policy-log.md; all with measured step times.
MODEL_ERROR = (
    "in three comparisons with real servers the ratio was up to 0.07 too low, 0.20 "
    "where contention begins"
)


def report(options: EstimateOptions, console: Console) -> None:
    """Simulate what the logs hold, and tell what was found.

    Raises:
        ValueError: options or logs that cannot be used.
        RuntimeError: there is no vLLM, or a run failed.
    """
    sessions = read_sessions(options.paths, Console(stderr=True))
    if sessions.mean_turns == 1.0:
        one_turn = "It will not help: every program of these logs has one turn."
        _tell([one_turn, *sessions.notes], console)
        return
    with (
        TemporaryDirectory(prefix="ttlcache-estimate-") as folder,
        pool.workers(PROCESSES) as on,
    ):
        trace = save_trace(sessions.programs, Path(folder))
        plan = plan_of(options, sessions, trace)
        if why := plan.why_no_estimate(sessions):
            _tell(sessions.notes, console)
            raise ValueError(why)
        options.out.mkdir(parents=True, exist_ok=True)  # before minutes are spent
        if find_spec("vllm") is None:
            raise RuntimeError("this command needs vLLM beside ttlcache")
        bar = Console(stderr=True)
        crowds = plan.capacity_cells(
            sessions.mean_context_tokens(plan.spec.max_context)
        )
        found = pool.run_cells(crowds, on, console=bar)
        limits = [result.steady["programs_per_s"] for result in found]
        rates = rates_of(options, max(limits))
        results = pool.run_cells(plan.cells(rates), on, console=bar)
        loads = loads_of(rates, results)
        caveats = _caveats(options, plan, sessions, limits)
    console.print(_table(_title(options, plan), loads))
    told = [*verdict(loads, sessions, limits), *caveats, _draw(options, loads)]
    _tell(told, console)
    numbers = {"loads": [asdict(load) for load in loads], "told": told}
    (options.out / "estimate.json").write_text(json.dumps(numbers, indent=1) + "\n")


def _tell(lines: Sequence[str], console: Console) -> None:
    for line in lines:
        console.print(escape(line), highlight=False)


def _title(options: EstimateOptions, plan: Plan) -> str:
    tokens, gpus = plan.engine.pool_tokens, MODELS[options.model].tp
    on = options.gpu if gpus == 1 else f"{gpus} {options.gpu}"
    return f"{options.model} on {on}, KV pool of {tokens:,} tokens"


def _table(title: str, loads: Sequence[Load]) -> Table:
    """Two rows a load; text in the first two columns, numbers in the others."""
    grid = Table(title=title, title_justify="left", box=box.SIMPLE)
    for index, name in enumerate(COLUMNS):
        justify: Literal["left", "right"] = "left" if index < 2 else "right"
        grid.add_column(name, justify=justify, no_wrap=index < 2, overflow="fold")
    for row in rows(loads):
        grid.add_row(*row)
    return grid


def _caveats(
    options: EstimateOptions, plan: Plan, sessions: Sessions, limits: Sequence[float]
) -> Sequence[str]:
    workload, found = build(plan.spec), [*sessions.notes]
    if options.profile:
        found.append(f"step times: measured, {options.profile}")
    else:
        found.append(f"step times: a roofline of {options.gpu}, not measured")
    found.append(MODEL_ERROR)
    if block_programs(plan.counted) < BLOCK_PROGRAMS:
        found.append("intervals of so few programs are too narrow")
    found.append(f"ttlcache has {plan.host_gb} GB of host memory, vLLM alone none")
    vllm, ours = (f"{limit:.2g}" for limit in limits)
    crowd = plan.crowd(sessions.mean_context_tokens(plan.spec.max_context))
    found.append(f"programs/s with {crowd} at once: vLLM {vllm}, ttlcache {ours}")
    programs = plan.spec.programs
    if programs < len(sessions.programs):
        found.append(f"each run draws {programs} of them")
    found += filter(None, [workload.caveat])
    return found


def _draw(options: EstimateOptions, loads: Sequence[Load]) -> str:
    if find_spec("matplotlib") is None:
        return "no picture without matplotlib: pip install 'ttlcache[plot]'"
    from ttlcache_sim.estimate.picture import draw

    path = options.out / "estimate.png"
    draw(loads, path)
    return f"picture: {path}"
