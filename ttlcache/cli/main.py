"""`ttlcache`: its commands."""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import Annotated, Any

import typer

from ttlcache.cli.command import command
from ttlcache.cli.config import config
from ttlcache.cli.explain import explain
from ttlcache.cli.plot import plot
from ttlcache.cli.report import report
from ttlcache.cli.top import top

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ttlcache {importlib.metadata.version('ttlcache')}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Show the version.",
        ),
    ] = False,
) -> None:
    """Look into a vLLM server that runs with ttlcache, live or from its recording."""


def _command_of(module: str, name: str) -> Any:
    """A command of another package, whose module can be imported without vLLM."""
    return getattr(importlib.import_module(module), name)


for each in (
    _command_of("ttlcache_connector.cli.doctor", "doctor"),
    command(_command_of("ttlcache_sim.estimate.cli", "estimate")),
    *(top, report, explain, plot, config),
    command(_command_of("ttlcache_connector.cli.serve_tiers", "serve_tiers")),
    command(_command_of("ttlcache_connector.front.cli", "front")),
):
    app.command()(each)
