"""`ttlcache estimate`: will it help me?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ttlcache.cli.common import fail
from ttlcache_sim.estimate.plan import MIN_PROGRAMS, EstimateOptions
from ttlcache_sim.estimate.report import report
from ttlcache_sim.steps.hardware import HARDWARE
from ttlcache_sim.steps.models import MODELS

_DEFAULTS = EstimateOptions(())


def estimate(
    paths: Annotated[list[Path], typer.Argument(help="Logs: files, or folders.")],
    model: Annotated[
        str, typer.Option(help=f"One of {', '.join(MODELS)}.")
    ] = _DEFAULTS.model,
    gpu: Annotated[
        str, typer.Option(help=f"One of {', '.join(HARDWARE)}.")
    ] = _DEFAULTS.gpu,
    profile: Annotated[
        Path | None, typer.Option(help="Measured step times, in place of a roofline.")
    ] = None,
    blocks: Annotated[
        int, typer.Option(help="KV pool in vLLM's blocks; 0: what the GPU has.", min=0)
    ] = _DEFAULTS.blocks,
    gpu_gb: Annotated[
        float, typer.Option(help="GB of a GPU; 0: as it is sold.", min=0, max=1e4)
    ] = _DEFAULTS.gpu_gb,
    rate: Annotated[
        float,
        typer.Option(
            help="Programs a second; 0: shares of the capacity.", min=0, max=1e6
        ),
    ] = _DEFAULTS.rate,
    programs: Annotated[
        int,
        typer.Option(
            help=f"Programs of a run, {MIN_PROGRAMS} at least; 0: as many as "
            "run in two to six minutes.",
            min=0,
        ),
    ] = _DEFAULTS.programs,
    out: Annotated[
        Path, typer.Option(help="Folder of the picture and the numbers.")
    ] = _DEFAULTS.out,
) -> None:
    """Your own sessions in vLLM's scheduler, with and without ttlcache: no GPU."""
    options = EstimateOptions(
        tuple(paths), model, gpu, profile, blocks, gpu_gb, rate, programs, out
    )
    try:
        report(options, Console())
    except (ValueError, RuntimeError, OSError) as error:
        fail(error)
