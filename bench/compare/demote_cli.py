"""`python -m bench demote`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from bench.compare.demo import DemoOptions

_DEFAULTS = DemoOptions()


def demote(
    modes: Annotated[
        str, typer.Option(help="Which, in this order, with commas between.")
    ] = "none,write-through,on-pressure,on-expiry",
    rounds: Annotated[int, typer.Option(help="How often each.", min=1)] = 1,
    programs: Annotated[int, typer.Option(help="How many agents.", min=1)] = (
        _DEFAULTS.programs
    ),
    rate: Annotated[float, typer.Option(help="Agent arrivals per second.")] = (
        _DEFAULTS.rate
    ),
    blocks: Annotated[int, typer.Option(help="KV pool, in blocks.", min=16)] = (
        _DEFAULTS.blocks
    ),
    seed: Annotated[int, typer.Option(help="Seed of the workload.")] = _DEFAULTS.seed,
    policy: Annotated[str, typer.Option(help="Retention policy.")] = "adaptive",
    cpu_gb: Annotated[float, typer.Option(help="Size of the CPU tier.")] = 2.0,
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path(
        "out/demote"
    ),
    model: Annotated[Path, typer.Option(help="Folder of the tiny model.")] = (
        _DEFAULTS.model
    ),
) -> None:
    """Bytes moved and completion times by when KV is copied down (needs LMCache)."""
    from bench.compare import demote as bench

    chosen = tuple(mode.strip() for mode in modes.split(","))
    unknown = [mode for mode in chosen if mode not in bench.MODES]
    if unknown:
        raise typer.BadParameter(f"--modes: {unknown[0]!r} is none of {bench.MODES}")
    options = DemoOptions(
        programs=programs,
        rate=rate,
        blocks=blocks,
        seed=seed,
        out=out,
        model=model,
        connector_config={"policy": policy},
    )
    raise typer.Exit(bench.run(options, chosen, cpu_gb, rounds, Console()))
