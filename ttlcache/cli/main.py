"""`ttlcache`: its commands."""

from __future__ import annotations

import importlib.metadata
from typing import Annotated

import typer

from ttlcache.cli.config import config
from ttlcache.cli.explain import explain
from ttlcache.cli.lazy import command_of, doctor
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


estimate = command_of("ttlcache_sim.estimate.cli", "estimate")
for command in (doctor, estimate, top, report, explain, plot, config):
    app.command()(command)
app.command()(command_of("ttlcache_connector.cli.serve_tiers", "serve_tiers"))
app.command()(command_of("ttlcache_connector.front.cli", "front"))
