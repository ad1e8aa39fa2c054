"""The command line of the benches: one entry a command."""

from __future__ import annotations

import typer

from bench.compare.demo import demo
from bench.compare.fleet.run import fleet
from bench.compare.harness import harness
from bench.compare.pin_vs_reload import pin_vs_reload
from bench.compare.prices import prices
from bench.compare.profile import profile
from bench.compare.settings import settings
from bench.compare.validate import validate
from bench.gpu.bundle import gpu_bundle
from bench.gpu.run import gpu
from bench.lmcache.plugin import lmcache_plugin
from bench.micro.overhead_core import overhead
from bench.micro.transfer_cli import transfer
from bench.report.figures.cli import figures
from bench.report.grid import grid
from bench.sim.cli import sim
from bench.stress.abuse.cli import abuse
from bench.stress.fuzz.cli import fuzz
from bench.stress.lmcache_store import lmcache_store
from bench.stress.soak.soak import soak
from bench.stress.wedge.run import wedge
from bench.surface.extract import read_surface
from ttlcache.cli.command import command

app = typer.Typer(no_args_is_help=True, add_completion=False)
_COMMANDS = (
    demo,
    overhead,
    wedge,
    sim,
    grid,
    figures,
    soak,
    transfer,
    gpu,
    gpu_bundle,
    abuse,
    fuzz,
    settings,
    fleet,
    pin_vs_reload,
    prices,
    profile,
    validate,
    harness,
    lmcache_plugin,
    lmcache_store,
)
for _run in _COMMANDS:
    app.command()(command(_run))
app.command("surface")(command(read_surface))


@app.callback()
def main() -> None:
    """Benches of ttlcache."""
