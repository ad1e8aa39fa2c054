"""`python -m bench above-tier`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from bench.compare.demo import DemoOptions
from bench.serve.process import ServerError

_DEFAULTS = DemoOptions()


def above_tier(
    rounds: Annotated[int, typer.Option(help="Pairs of each load.", min=1)] = 3,
    trace: Annotated[
        Path | None,
        typer.Option(help="Recorded agents (gzip JSON lines); else synthetic ones."),
    ] = None,
    programs: Annotated[int, typer.Option(help="Agents of the full load.", min=1)] = 28,
    at_once: Annotated[int, typer.Option(help="So many of them at a time.", min=1)] = (
        18
    ),
    light_programs: Annotated[
        int, typer.Option(help="Agents of the light load; 0: without it.", min=0)
    ] = 8,
    light_at_once: Annotated[
        int, typer.Option(help="So many of them at a time.", min=1)
    ] = 2,
    blocks: Annotated[int, typer.Option(help="KV pool, blocks of 32 tokens.")] = 257,
    cpu_gb: Annotated[
        float, typer.Option(help="CPU memory of each LMCache server, GiB.")
    ] = _DEFAULTS.tiers.cpu_gb,
    token_scale: Annotated[
        float, typer.Option(help="Factor on the paper's token counts.")
    ] = 0.035,
    gap_cap: Annotated[float, typer.Option(help="Longest tool call, seconds.")] = 3.0,
    hints: Annotated[
        bool, typer.Option(help="Agents say program, tool and last step.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of the first round.")] = _DEFAULTS.seed,
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path(
        "out/above-tier"
    ),
    model: Annotated[Path, typer.Option(help="Folder of the tiny model.")] = (
        _DEFAULTS.model
    ),
) -> None:
    """TTLConnector against LMCache's connector, each above an LMCache server."""
    # Here: the servers and clients are needed by this command only.
    from bench.compare import above_tier as bench

    console = Console()
    full = DemoOptions(
        programs=programs,
        at_once=at_once,
        blocks=blocks,
        token_scale=token_scale,
        gap_cap_s=gap_cap,
        trace=trace,
        hints=hints,
        tiers=replace(_DEFAULTS.tiers, cpu_gb=cpu_gb),
        seed=seed,
        out=out / "full",
        model=model,
    )
    light = replace(
        full, programs=light_programs, at_once=light_at_once, out=out / "light"
    )
    loads = {"full load": (full, bench.LOADED)}
    if light_programs:
        loads["light load"] = (light, bench.LIGHT)
    try:
        status = bench.run(loads, rounds, console)
    except (ServerError, ValueError) as error:
        console.print(
            f"[red]error:[/] {escape(str(error))}", soft_wrap=True, highlight=False
        )
        status = 1
    raise typer.Exit(status)
