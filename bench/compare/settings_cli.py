"""`python -m bench settings`."""

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


def settings(
    with_: Annotated[
        list[str],
        typer.Option(
            "--with",
            help="A JSON object: TTLConnector with this kv_connector_extra_config; "
            "vanilla: no connector; lmcache, or lmcache:{...}: LMCache's own connector "
            "and its configuration. Say it twice or more; the first one is what the "
            "others are compared with. Each arm above LMCache has its own server.",
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
    gap_cap: Annotated[float, typer.Option(help="Longest tool call, seconds.")] = (
        _DEFAULTS.gap_cap_s
    ),
    trace: Annotated[
        Path | None, typer.Option(help="Replay this trace (gzip JSON lines).")
    ] = None,
    at_once: Annotated[
        int | None,
        typer.Option(help="So many agents at a time; --rate counts no more.", min=1),
    ] = None,
    hints: Annotated[
        bool, typer.Option(help="Agents say program, tool and last step.")
    ] = True,
    cpu_gb: Annotated[
        float, typer.Option(help="CPU memory of each LMCache server, GiB.")
    ] = _DEFAULTS.tiers.cpu_gb,
    chunk_tokens: Annotated[
        int, typer.Option(help="Tokens of an LMCache chunk, a multiple of 32.", min=32)
    ] = _DEFAULTS.tiers.chunk_tokens,
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
    """Connectors and settings against each other on real vLLM, round by round."""
    # Here: the servers and clients are needed by this command only.
    from bench.compare import settings as bench

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
        gap_cap_s=gap_cap,
        trace=trace,
        at_once=at_once,
        hints=hints,
        tiers=replace(_DEFAULTS.tiers, cpu_gb=cpu_gb, chunk_tokens=chunk_tokens),
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
