"""The command line of the benches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

from bench.compare.above_tier_cli import above_tier
from bench.compare.demo import DemoOptions, run_demo
from bench.compare.demote_cli import demote
from bench.compare.disk_tier_cli import disk_tier
from bench.compare.fleet.cli import fleet
from bench.compare.pin_vs_reload_cli import pin_vs_reload
from bench.compare.prices_cli import prices
from bench.compare.settings_cli import settings
from bench.gaps import replay, report
from bench.gaps.costs import CostSetting
from bench.lmcache.plugin_cli import lmcache_plugin
from bench.lmcache.upstream_tests.cli import lmcache_tests
from bench.micro import overhead_recorder, overhead_report
from bench.micro.transfer_cli import transfer
from bench.report.figures.cli import figures
from bench.report.grid_cli import grid
from bench.serve.process import ServerError
from bench.sim.cli import sim
from bench.sim.traces import TraceError
from bench.stress.abuse.cli import abuse
from bench.stress.fuzz.cli import fuzz
from bench.stress.lmcache_store_cli import lmcache_store
from bench.stress.soak.cli import soak
from bench.stress.wedge.cli import wedge
from bench.surface.cli import surface_command
from ttlcache.errors import ConfigError

app = typer.Typer(no_args_is_help=True, add_completion=False)
_DEFAULTS = DemoOptions()
app.command()(wedge)
app.command()(sim)
app.command()(grid)
app.command()(figures)
app.command()(soak)
app.command()(transfer)
app.command()(abuse)
app.command()(fuzz)
app.command("surface")(surface_command)
app.command()(demote)
app.command()(disk_tier)
app.command()(settings)
app.command("above-tier")(above_tier)
app.command()(fleet)
app.command()(pin_vs_reload)
app.command()(prices)
app.command()(lmcache_plugin)
app.command()(lmcache_store)
app.command()(lmcache_tests)
_COSTS = CostSetting()


@app.callback()
def main() -> None:
    """Benches of ttlcache."""


@app.command()
def demo(
    programs: Annotated[int, typer.Option(help="How many agents.", min=1)] = (
        _DEFAULTS.programs
    ),
    rate: Annotated[float, typer.Option(help="Agent arrivals per second.")] = (
        _DEFAULTS.rate
    ),
    blocks: Annotated[int, typer.Option(help="KV pool, in blocks.", min=16)] = (
        _DEFAULTS.blocks
    ),
    token_scale: Annotated[
        float, typer.Option(help="Factor on the paper's token counts.")
    ] = _DEFAULTS.token_scale,
    gap_cap: Annotated[float, typer.Option(help="Longest tool call, seconds.")] = (
        _DEFAULTS.gap_cap_s
    ),
    seed: Annotated[int, typer.Option(help="Seed of the workload.")] = _DEFAULTS.seed,
    trace: Annotated[
        Path | None, typer.Option(help="Replay this trace (gzip JSON lines).")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = _DEFAULTS.out,
    model: Annotated[Path, typer.Option(help="Folder of the tiny model.")] = (
        _DEFAULTS.model
    ),
    policy: Annotated[
        str | None, typer.Option(help="Retention policy of the ttlcache arm.")
    ] = None,
    connector_config: Annotated[
        str, typer.Option(help="JSON object: kv_connector_extra_config.")
    ] = "{}",
) -> None:
    """The same agents without TTLConnector and with it, alone and above LMCache."""
    console = Console()
    options = DemoOptions(
        programs=programs,
        rate=rate,
        blocks=blocks,
        token_scale=token_scale,
        gap_cap_s=gap_cap,
        seed=seed,
        trace=trace,
        out=out,
        model=model,
        connector_config=_connector_config(connector_config, policy),
    )
    try:
        status = run_demo(options, console)
    except (ServerError, ValueError, FileExistsError) as error:
        console.print(
            f"[red]error:[/] {escape(str(error))}", soft_wrap=True, highlight=False
        )
        status = 1
    raise typer.Exit(status)


@app.command()
def gaps(
    traces: Annotated[list[Path], typer.Argument(help="Traces, gzip JSON lines.")],
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write all numbers to this file.")
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(help='Only these, as NAME or NAME:{"option": value}.'),
    ] = None,
    explain: Annotated[
        list[str] | None,
        typer.Option(help="Show where this policy's cost arises, by reason and key."),
    ] = None,
    prefill: Annotated[
        tuple[float, float, float],
        typer.Option(help="Recovery: s a token, s a token^2, s. See bench.gaps.costs."),
    ] = _COSTS.prefill,
    delay: Annotated[
        float, typer.Option(help="T, queueing seconds of an evicted return.", min=0.0)
    ] = _COSTS.queueing_delay_s,
    price: Annotated[
        float, typer.Option(help="Seconds of delay a second of holding.", min=0.0)
    ] = _COSTS.price,
    eta: Annotated[
        float | None, typer.Option(help="Memoryfulness shown; learnt by default.")
    ] = None,
    running_tokens: Annotated[
        int, typer.Option(help="Tokens of running requests (InferCept).", min=0)
    ] = _COSTS.running_tokens,
    rate: Annotated[
        float, typer.Option(help="Programs a second where none recorded.")
    ] = 0.1,
    seed: Annotated[int, typer.Option(help="Seed of those arrivals.")] = 0,
    tell_last: Annotated[
        bool, typer.Option("--tell-last", help="Programs announce their last turn.")
    ] = False,
) -> None:
    """TTLs of every policy on recorded gaps, against hindsight; past only."""
    console = Console()
    options = report.GapOptions(
        CostSetting(prefill, delay, price, eta, running_tokens), rate, seed, tell_last
    )
    arms: tuple[replay.Arm, ...] = report.DEFAULT_ARMS
    try:
        if policy:
            arms = tuple(report.parse_arm(text) for text in policy)
        results = [report.run_trace(path, arms, options) for path in traces]
    except (TraceError, ConfigError, ValueError) as error:
        _fail(console, error)
    report.print_setting(options, console)
    for result in results:
        console.print(report.table(result))
        for arm in explain or ():
            if arm not in result.scores:
                raise typer.BadParameter(f"--explain {arm}: no such row")
            console.print(*report.explanation(result, arm))
    if len(results) > 1:
        console.print(report.summary(results))
    if json_path is not None:
        _write_json(json_path, report.to_json(results, options))


@app.command()
def overhead(
    core: Annotated[
        bool, typer.Option("--core", help="The core alone, without vLLM.")
    ] = False,
    scheduler: Annotated[
        bool,
        typer.Option("--scheduler", help="TTLScheduler against plain vLLM, paired."),
    ] = False,
    steps: Annotated[
        int | None,
        typer.Option(help="Steps of --recorder (20000) or --scheduler (600).", min=20),
    ] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write all numbers to this file.")
    ] = None,
    programs: Annotated[
        int, typer.Option(help="Programs sent through the controller.", min=10)
    ] = 1_000_000,
    idle_programs: Annotated[
        int, typer.Option(help="Live idle programs whose bytes are counted.", min=100)
    ] = 50_000,
    repeats: Annotated[
        int, typer.Option(help="Timed calls of each kind.", min=50)
    ] = 2_000,
    recorder: Annotated[
        bool, typer.Option("--recorder", help="Recorder and metrics, a step.")
    ] = False,
    events: Annotated[
        int, typer.Option(help="Events whose memory --recorder watches.", min=1000)
    ] = 1_000_000,
) -> None:
    """What ttlcache itself costs: microseconds and bytes. Exit status 1: bar missed."""
    if core + recorder + scheduler != 1:
        raise typer.BadParameter("say --core, --recorder or --scheduler")
    console = Console()
    if recorder:
        cost = overhead_recorder.measure(steps or 20_000, events)
        if json_path is not None:
            _write_json(json_path, overhead_recorder.to_json(cost))
        raise typer.Exit(0 if overhead_recorder.report(cost, console) else 1)
    if scheduler:
        # Here: only this scope needs vLLM.
        from bench.micro import overhead_scheduler

        paired = overhead_scheduler.run(steps or 600, console)
        if json_path is not None:
            _write_json(json_path, overhead_scheduler.to_json(paired, steps or 600))
        raise typer.Exit(0 if overhead_scheduler.print_table(paired, console) else 1)
    result = overhead_report.run(programs, idle_programs, repeats, console)
    if json_path is not None:
        _write_json(json_path, overhead_report.to_json(result))
    raise typer.Exit(0 if overhead_report.print_bars(result, console) else 1)


def _fail(console: Console, error: Exception) -> NoReturn:
    console.print(
        f"[red]error:[/] {escape(str(error))}", soft_wrap=True, highlight=False
    )
    raise typer.Exit(1)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1) + "\n")


def _connector_config(text: str, policy: str | None) -> dict[str, Any]:
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise typer.BadParameter(f"--connector-config is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise typer.BadParameter("--connector-config must be a JSON object")
    return {**config, "policy": policy} if policy is not None else config
