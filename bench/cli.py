"""The command line of the benches: one entry a command."""

from __future__ import annotations

import typer

from bench.command import command
from bench.compare.demo import DemoOptions, demo
from bench.compare.fleet.arms import FleetOptions
from bench.compare.fleet.run import fleet
from bench.compare.harness import HarnessOptions, harness
from bench.compare.pin_vs_reload import PinVsReloadOptions, pin_vs_reload
from bench.compare.prices import PricesOptions, prices
from bench.compare.profile import ProfileOptions, profile
from bench.compare.settings import SettingsOptions, settings
from bench.compare.validate import ValidateOptions, validate
from bench.estimate.cli import estimate
from bench.estimate.plan import EstimateOptions
from bench.gaps.report import GapOptions, gaps
from bench.gpu.bundle import BundleOptions, gpu_bundle
from bench.gpu.run import GpuOptions, gpu
from bench.lmcache.plugin import PluginBenchOptions, lmcache_plugin
from bench.micro.overhead_core import OverheadOptions, overhead
from bench.micro.transfer_cli import TransferOptions, transfer
from bench.report.figures.cli import FiguresOptions, figures
from bench.report.grid import grid
from bench.report.grid_spec import GridOptions
from bench.sim.cli import sim
from bench.sim.options import SimOptions
from bench.stress.abuse.cli import AbuseOptions, abuse
from bench.stress.fuzz.cli import FuzzOptions, fuzz
from bench.stress.lmcache_store import StoreOptions, lmcache_store
from bench.stress.soak.options import SoakOptions
from bench.stress.soak.soak import soak
from bench.stress.wedge.run import WedgeOptions, wedge
from bench.surface.extract import SurfaceOptions, read_surface

app = typer.Typer(no_args_is_help=True, add_completion=False)
app.command()(command(DemoOptions)(demo))
app.command()(command(GapOptions)(gaps))
app.command()(command(OverheadOptions)(overhead))
app.command()(command(WedgeOptions)(wedge))
app.command()(command(EstimateOptions)(estimate))
app.command()(command(SimOptions)(sim))
app.command()(command(GridOptions)(grid))
app.command()(command(FiguresOptions)(figures))
app.command()(command(SoakOptions)(soak))
app.command()(command(TransferOptions)(transfer))
app.command()(command(GpuOptions)(gpu))
app.command("gpu-bundle")(command(BundleOptions)(gpu_bundle))
app.command()(command(AbuseOptions)(abuse))
app.command()(command(FuzzOptions)(fuzz))
app.command("surface")(command(SurfaceOptions)(read_surface))
app.command()(command(SettingsOptions)(settings))
app.command()(command(FleetOptions)(fleet))
app.command()(command(PinVsReloadOptions)(pin_vs_reload))
app.command()(command(PricesOptions)(prices))
app.command()(command(ProfileOptions)(profile))
app.command()(command(ValidateOptions)(validate))
app.command()(command(HarnessOptions)(harness))
app.command()(command(PluginBenchOptions)(lmcache_plugin))
app.command()(command(StoreOptions)(lmcache_store))


@app.callback()
def main() -> None:
    """Benches of ttlcache."""
