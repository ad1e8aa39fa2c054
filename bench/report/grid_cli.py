"""The command `python -m bench grid`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from bench.report.grid import print_grid, run_grid, to_json
from bench.report.grid_spec import LOADS, POOLS, WORKLOADS, GridOptions
from bench.sim.traces import TraceError

_RUN = GridOptions()
#: `--subset`: one workload of each kind, the dear pool left out.
_SUBSET = GridOptions(
    workloads=("swe", "tb_mini_swe_agent"),
    pools=("small", "offload"),
    arms="vllm,program-fcfs,cachettl,ski-rental,thunderagent,adaptive,oracle",
    programs=0.6,
)


def grid(
    traces: Annotated[
        Path, typer.Option(help="Folder of the trace files.")
    ] = _RUN.traces,
    workloads: Annotated[str, typer.Option(help=",".join(WORKLOADS))] = "",
    pools: Annotated[str, typer.Option(help=",".join(POOLS))] = "",
    loads: Annotated[
        str, typer.Option(help=f"{','.join(LOADS)}, of vLLM's saturation.")
    ] = "",
    arms: Annotated[str, typer.Option(help="As for sim; all by default.")] = "",
    half: Annotated[
        str, typer.Option(help="Lines of the traces: tune on odd, report on even.")
    ] = _RUN.half,
    seeds: Annotated[str, typer.Option(help="0,1 for even, 100,101 for odd.")] = "",
    programs: Annotated[
        float,
        typer.Option(help="Factor on the number of programs; 0: as built in.", min=0.0),
    ] = 0.0,
    subset: Annotated[
        bool, typer.Option("--subset", help="A small grid, some minutes.")
    ] = False,
    tell_last: Annotated[
        bool, typer.Option(help="Clients say which turn is their last one.")
    ] = _RUN.tell_last,
    processes: Annotated[int, typer.Option(help="Cells at a time.", min=1)] = 2,
    cache: Annotated[
        bool, typer.Option(help="Reuse results of unchanged arguments and code.")
    ] = True,
    out: Annotated[Path | None, typer.Option(help="Results, as JSON.")] = None,
) -> None:
    """Every arm on every cell: workloads x loads x pools x seeds, and the verdict."""
    console = Console()
    base = _SUBSET if subset else _RUN
    options = GridOptions(
        traces=traces,
        workloads=_names(workloads) or base.workloads,
        loads=_names(loads) or base.loads,
        pools=_names(pools) or base.pools,
        arms=arms or base.arms,
        half=half,
        seeds=seeds,
        programs=programs or base.programs,
        tell_last=tell_last,
    )
    kept = {} if cache else {"cache": None}
    try:
        result = run_grid(options, console, processes=processes, **kept)
    except (ValueError, RuntimeError, TraceError) as error:
        console.print(
            f"[red]error:[/] {escape(str(error))}", soft_wrap=True, highlight=False
        )
        raise typer.Exit(1) from None
    print_grid(result, console)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(to_json(options, result) + "\n")
        wall = json.dumps({"cpu_s": round(result.cpu_s)})
        out.with_suffix(".wall.json").write_text(wall + "\n")


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())
