"""`python -m bench grid`: all arms on all cells, and the verdict."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import Any

from rich.console import Console

from bench.report import grid_verdict
from bench.report.grid_spec import (
    MIN_SEEDS,
    SMOKE,
    GridOptions,
    Point,
    capacity_runs,
    places,
    points,
)
from bench.sim import run
from bench.sim.rivals.arms import parse_arms
from bench.sim.settings import Cell
from bench.tables import table
from ttlcache_sim.bootstrap import paired_bootstrap
from ttlcache_sim.load.workload import build
from ttlcache_sim.metrics import percentile
from ttlcache_sim.settings import CellResult

_DIGITS = 6
#: Options that change no number, or are told another way.
_NOT_TOLD = ("traces", "processes", "use_cache", "out", "smoke")

#: Of a cell of the grid, by arm: one result a seed.
Runs = dict[str, list[CellResult]]


@dataclass(frozen=True, slots=True)
class GridResult:
    """rows: one a cell. cpu_s: of all runs, cached ones included."""

    rows: list[dict[str, Any]]
    cpu_s: float


def grid(options: GridOptions, console: Console) -> None:
    """Every arm on every cell: workloads x pools x loads x seeds, and the verdict."""
    if options.smoke:
        options = replace(options, **smoke_of(options))
    result = run_grid(options, console)
    print_grid(result, console)
    if (out := options.out) is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(to_json(options, result) + "\n")


def smoke_of(options: GridOptions) -> dict[str, Any]:
    """What `--smoke` sets: what nobody gave."""
    given = GridOptions()
    return {k: v for k, v in SMOKE.items() if getattr(options, k) == getattr(given, k)}


def run_grid(options: GridOptions, console: Console) -> GridResult:
    """Measure the capacity of every place, then run every cell, seed by seed.

    A run is cached when it is done: a grid that was interrupted goes on where it was.

    Raises:
        ValueError, RuntimeError: bad options; runs that failed, after all others.
    """
    cpu_s: list[float] = []

    def measure(cells: Sequence[Cell]) -> list[CellResult]:
        results = run.run_cells(
            cells,
            processes=options.processes,
            cache=run.CACHE if options.use_cache else None,
            console=console,
        )
        cpu_s.extend(result.wall["cpu_s"] for result in results)
        return results

    where = places(options)
    arms = {arm.name: arm for arm in parse_arms(options.arms)}
    loops = [capacity_runs(place) for place in where]
    loop_results = iter(measure(list(chain(*loops))))
    capacities = [
        max(next(loop_results).steady["programs_per_s"] for _ in own) for own in loops
    ]
    found = points(options, where, capacities)
    runs: list[Runs] = [{arm: [] for arm in arms} for _ in found]
    for number in range(max(options.seeds, MIN_SEEDS)):
        todo = [
            (own[name], point.run(arms[name], len(own[name])))
            for point, own in zip(found, runs, strict=True)
            for name in (arms if number < MIN_SEEDS else unsettled(own))
        ]
        results = measure([cell for _, cell in todo])
        for (of_arm, _), result in zip(todo, results, strict=True):
            of_arm.append(result)
    rows = [to_row(*pair) for pair in zip(found, runs, strict=True)]
    return GridResult(rows, sum(cpu_s))


def unsettled(runs: Runs) -> list[str]:
    """Arms whose ratio to the base needs another seed, and what can be the base.

    An arm that was settled may need one later: another reading can be the base then.
    """
    base, ratios = base_and_ratios(runs)
    names = {n for n, ratio in ratios.items() if not grid_verdict.is_settled(ratio)}
    most = max((len(runs[name]) for name in names), default=0)
    bases = {base, *(arm for arm in grid_verdict.READINGS if arm in runs)}
    behind = {arm for arm in bases if names and len(runs[arm]) <= most}
    return [arm for arm in runs if arm in names | behind]


def base_and_ratios(runs: Runs) -> tuple[str, dict[str, Any]]:
    """The base of a cell, and every arm's mean JCT over its, seed by seed."""

    def jct_s(arm: str) -> list[Sequence[float]]:
        return [result.steady["jct_s"] for result in runs[arm]]

    readings = [arm for arm in grid_verdict.READINGS if arm in runs]
    base = min(
        readings or list(runs)[:1], key=lambda arm: statistics.fmean(chain(*jct_s(arm)))
    )
    # Of arms that were settled earlier there are fewer seeds.
    return base, {
        arm: paired_bootstrap(jct_s(arm), jct_s(base)[: len(own)])
        for arm, own in runs.items()
    }


def to_row(point: Point, runs: Runs) -> dict[str, Any]:
    """A cell of the grid: its setting, and per arm what is kept of its runs."""
    base, ratios = base_and_ratios(runs)
    place = point.place
    return {
        "workload": place.workload,
        "pool": place.pool,
        "load": point.load,
        "capacity": _short(point.capacity),
        "rate": point.rate,
        "blocks": place.engine.blocks,
        "offload": place.engine.offload,
        "caveat": build(place.spec).caveat,
        "base": base,
        "arms": {
            arm: {
                "seeds": len(own),
                "over_base": [
                    _short(getattr(ratios[arm], end))
                    for end in ("ratio", "low", "high")
                ],
                **_kept([result.steady for result in own[:MIN_SEEDS]]),
            }
            for arm, own in runs.items()
        },
    }


def _kept(seeds: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Of the seeds that all arms have."""
    jct_s = list(chain(*(each["jct_s"] for each in seeds)))
    kept = {"mean_jct_s": statistics.fmean(jct_s)}
    kept |= {f"p{q}_jct_s": percentile(jct_s, q) for q in (50, 95, 99)}
    for index, q in enumerate((50, 95, 99)):
        kept[f"p{q}_ttft_s"] = statistics.fmean(each["ttft_s"][index] for each in seeds)
    kept["worst_turn_s"] = max(each["worst_turn_s"] for each in seeds)
    kept["held"] = statistics.fmean(chain(*(each["held"] for each in seeds)))
    for key in ("prompt_hit", "programs_per_s"):
        kept[key] = statistics.fmean(each[key] for each in seeds)
    return {key: _short(value) for key, value in kept.items()}


def _short(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


def to_json(options: GridOptions, result: GridResult) -> str:
    """No times of this machine: same arguments and code, same bytes."""
    setting = {
        "half": options.half,
        "programs": options.programs,
        "vllm": run.vllm_version(),
        "command": command(options),
    }
    rows = ",\n".join(map(json.dumps, result.rows))
    head = json.dumps({"setting": setting}, indent=1, sort_keys=True)
    return head[:-2] + ',\n "rows": [\n' + rows + "\n]}"


def command(options: GridOptions) -> str:
    """What gives these numbers again, but for the folder of the traces."""
    given = GridOptions()
    words = ["python -m bench grid --traces DIR"]
    if options.smoke:
        given = replace(given, **smoke_of(given))
        words.append("--smoke")
    for each in fields(options):
        value = getattr(options, each.name)
        if each.name in _NOT_TOLD or value == getattr(given, each.name):
            continue
        if value is False:
            words.append(f"--no-{each.name.replace('_', '-')}")
            continue
        text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        words.append(f"--{each.name} " + (f"'{text}'" if "{" in text else text))
    return " ".join(words)


def print_grid(result: GridResult, console: Console) -> None:
    """The cells, the arms, the verdict, and what a reader has to know of the load."""
    wide = Console(width=max(console.width, 220), file=console.file)
    for title, (header, body) in (
        ("mean JCT / base", grid_verdict.cells(result.rows)),
        ("over the base, geometric mean of the cells", grid_verdict.arms(result.rows)),
        ("verdict, 95 % intervals", grid_verdict.verdict(result.rows)),
    ):
        wide.print(table(title, header, body, plain=True))
    for caveat in grid_verdict.caveats(result.rows):
        wide.print(caveat)
    wide.print(f"CPU time of all runs: {result.cpu_s / 3600:.2f} h")
