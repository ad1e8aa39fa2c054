"""`python -m bench soak`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from bench.serve.process import ServerError
from bench.sim.traces import TraceError
from bench.stress.soak.soak import SoakOptions, run_soak

_DEFAULTS = SoakOptions()
TRACE_FOLDER = Path("../shared/traces")
TRACE_NAMES = ("tb_mini_swe_agent", "sweagent_java", "weka_claude_code")


def soak(
    minutes: Annotated[
        float, typer.Option(help="How long the agents run.", min=0.1)
    ] = (_DEFAULTS.minutes),
    agents: Annotated[int, typer.Option(help="Concurrent agents.", min=1)] = (
        _DEFAULTS.agents
    ),
    trace: Annotated[
        list[Path] | None, typer.Option(help="Traces to mix (gzip JSON lines).")
    ] = None,
    blocks: Annotated[int, typer.Option(help="KV pool, in blocks.", min=160)] = (
        _DEFAULTS.blocks
    ),
    rss_growth: Annotated[
        float, typer.Option(help="Allowed growth per process after warm-up, MiB.")
    ] = _DEFAULTS.rss_growth_mib,
    own: Annotated[
        float, typer.Option(help="Most that ttlcache's own objects may hold, MiB.")
    ] = _DEFAULTS.own_mib,
    vanilla: Annotated[
        bool, typer.Option("--vanilla", help="The same load on vLLM without ttlcache.")
    ] = False,
    sample: Annotated[
        float, typer.Option(help="Seconds between two samples.", min=0.2)
    ] = _DEFAULTS.sample_s,
    seed: Annotated[int, typer.Option(help="Seed of the agents.")] = _DEFAULTS.seed,
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = _DEFAULTS.out,
    model: Annotated[Path, typer.Option(help="Folder of the tiny model.")] = (
        _DEFAULTS.model
    ),
) -> None:
    """A real server on a tiny pool under misbehaving agents. Exit status 1: it leaks,
    waits, errs or leaves something unanswered."""
    console = Console()
    options = SoakOptions(
        minutes=minutes,
        agents=agents,
        traces=tuple(trace) if trace else default_traces(console),
        blocks=blocks,
        sample_s=sample,
        rss_growth_mib=rss_growth,
        own_mib=own,
        vanilla=vanilla,
        seed=seed,
        out=out,
        model=model,
    )
    try:
        status = run_soak(options, console)
    except (ServerError, TraceError, FileExistsError) as error:
        console.print(
            f"[red]error:[/] {escape(str(error))}", soft_wrap=True, highlight=False
        )
        status = 1
    raise typer.Exit(status)


def default_traces(console: Console, folder: Path = TRACE_FOLDER) -> tuple[Path, ...]:
    """The three recorded workloads, or none, saying so, where they are not at hand."""
    paths = tuple(folder / f"{name}.jsonl.gz" for name in TRACE_NAMES)
    missing = [path for path in paths if not path.is_file()]
    if not missing:
        return paths
    console.print(
        f"{missing[0]} is not there: the agents run the synthetic workload",
        soft_wrap=True,
    )
    return ()
