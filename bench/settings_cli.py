"""`python -m bench settings`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from bench.demo import DemoOptions
from bench.process import ServerError

_DEFAULTS = DemoOptions()


def settings(
    with_: Annotated[
        list[str],
        typer.Option(
            "--with",
            help="A JSON object: kv_connector_extra_config; or vanilla. Say it twice "
            "or more; the first one is what the others are compared with.",
        ),
    ],
    rounds: Annotated[int, typer.Option(help="How often each.", min=1)] = 3,
    programs: Annotated[int, typer.Option(help="How many agents.", min=1)] = 24,
    rate: Annotated[float, typer.Option(help="Agent arrivals per second.")] = (
        _DEFAULTS.rate
    ),
    blocks: Annotated[int, typer.Option(help="KV pool, in blocks.", min=16)] = 768,
    token_scale: Annotated[
        float, typer.Option(help="Factor on the paper's token counts.")
    ] = _DEFAULTS.token_scale,
    seed: Annotated[
        int, typer.Option(help="Of the first round; each has its own.")
    ] = _DEFAULTS.seed,
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path(
        "out/settings"
    ),
    model: Annotated[Path, typer.Option(help="Folder of the tiny model.")] = (
        _DEFAULTS.model
    ),
) -> None:
    """Settings of the connector against each other on real vLLM, round by round."""
    # Here: the servers and clients are needed by this command only.
    from bench import settings as bench

    console = Console()
    try:
        chosen = bench.parse(with_)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    options = DemoOptions(
        programs=programs,
        rate=rate,
        blocks=blocks,
        token_scale=token_scale,
        seed=seed,
        out=out,
        model=model,
    )
    try:
        status = bench.run(options, chosen, rounds, console)
    except (ServerError, ValueError) as error:
        console.print(
            f"[red]error:[/] {escape(str(error))}", soft_wrap=True, highlight=False
        )
        status = 1
    raise typer.Exit(status)
