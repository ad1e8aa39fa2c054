"""`python -m bench fleet`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from bench.compare.fleet.arms import ARMS
from bench.compare.fleet.run import FleetOptions, run
from bench.serve.process import ServerError

_DEFAULTS = FleetOptions()


def fleet(
    arms: Annotated[
        str, typer.Option(help=f"Which, comma separated: {', '.join(ARMS)}.")
    ] = ",".join(_DEFAULTS.arms),
    programs: Annotated[int, typer.Option(help="How many agents.", min=1)] = (
        _DEFAULTS.programs
    ),
    rate: Annotated[float, typer.Option(help="Agent arrivals per second.")] = (
        _DEFAULTS.rate
    ),
    replicas: Annotated[int, typer.Option(help="vLLM servers.", min=2)] = (
        _DEFAULTS.replicas
    ),
    blocks: Annotated[
        int, typer.Option(help="KV pool of each replica, in blocks.", min=16)
    ] = _DEFAULTS.blocks,
    token_scale: Annotated[
        float, typer.Option(help="Factor on the paper's token counts.")
    ] = _DEFAULTS.token_scale,
    gap_cap: Annotated[float, typer.Option(help="Longest tool call, seconds.")] = (
        _DEFAULTS.gap_cap_s
    ),
    seed: Annotated[int, typer.Option(help="Seed of the workload.")] = _DEFAULTS.seed,
    tier_gb: Annotated[
        float,
        typer.Option(
            help="GB of the LMCache server that replicas share in +lmcache arms.",
            min=0.01,
        ),
    ] = _DEFAULTS.tier_gb,
    kill_at_turn: Annotated[
        int | None,
        typer.Option(
            help="SIGKILL a replica after so many completed turns, in every arm "
            "that has several.",
            min=1,
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = _DEFAULTS.out,
    model: Annotated[Path, typer.Option(help="Folder of the tiny model.")] = (
        _DEFAULTS.model
    ),
    connector_config: Annotated[
        str, typer.Option(help="JSON object: kv_connector_extra_config.")
    ] = "{}",
) -> None:
    """Replicas with TTLConnector behind vllm-router: one arm a routing policy."""
    console = Console()
    options = FleetOptions(
        arms=_arms(arms),
        programs=programs,
        rate=rate,
        replicas=replicas,
        blocks=blocks,
        token_scale=token_scale,
        gap_cap_s=gap_cap,
        seed=seed,
        tier_gb=tier_gb,
        kill_at_turn=kill_at_turn,
        out=out,
        model=model,
        connector_config=_object(connector_config),
    )
    try:
        status = run(options, console)
    except (ServerError, ValueError, FileExistsError) as error:
        console.print(
            f"[red]error:[/] {escape(str(error))}", soft_wrap=True, highlight=False
        )
        status = 1
    raise typer.Exit(status)


def _arms(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    unknown = [name for name in names if name not in ARMS]
    if unknown or not names:
        raise typer.BadParameter(f"--arms {text}: expected some of {', '.join(ARMS)}")
    return names


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise typer.BadParameter(f"--connector-config is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise typer.BadParameter("--connector-config is no JSON object")
    return value
