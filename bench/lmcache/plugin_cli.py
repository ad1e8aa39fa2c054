"""`bench lmcache-plugin`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from bench.lmcache.plugin import ORACLE, PluginBenchOptions, run_plugin_bench

_DEFAULTS = PluginBenchOptions()


def lmcache_plugin(
    engine: Annotated[
        str, typer.Option(help="sim (no server), toy (no model) or vllm (CPU).")
    ] = _DEFAULTS.engine,
    programs: Annotated[int, typer.Option(min=1)] = _DEFAULTS.programs,
    rate: Annotated[float, typer.Option(help="Arrivals a second.")] = _DEFAULTS.rate,
    token_scale: Annotated[float, typer.Option()] = _DEFAULTS.token_scale,
    gap_cap: Annotated[float, typer.Option(help="Seconds.")] = _DEFAULTS.gap_cap_s,
    l1_share: Annotated[
        float, typer.Option(help="L1 as a share of the working set.")
    ] = _DEFAULTS.l1_share,
    blocks: Annotated[
        int, typer.Option(min=16, help="KV pool of vLLM, in blocks of 32 tokens.")
    ] = _DEFAULTS.blocks,
    pool_share: Annotated[
        float, typer.Option(min=0, help="Pool of the engine, of L1 (sim).")
    ] = _DEFAULTS.pool_share,
    arms: Annotated[
        str,
        typer.Option(help="Of LRU, ARC, IsolatedLRU, ttl, oracle (sim); by comma."),
    ] = ",".join(_DEFAULTS.arms),
    policy: Annotated[
        str, typer.Option(help="Retention policy of the ttl arm.")
    ] = _DEFAULTS.policy,
    uniform: Annotated[
        bool, typer.Option(help="Contexts drawn at random: nothing to learn.")
    ] = False,
    seed: Annotated[int, typer.Option()] = _DEFAULTS.seed,
    trace: Annotated[Path | None, typer.Option(help="Replay this trace.")] = None,
    half: Annotated[
        str, typer.Option(help="Lines of the trace: odd or even; all if empty.")
    ] = _DEFAULTS.half,
    out: Annotated[Path, typer.Option()] = _DEFAULTS.out,
    model: Annotated[Path, typer.Option()] = _DEFAULTS.model,
) -> None:
    """LMCache with our server module against its own eviction policies."""
    if engine != "sim" and ORACLE in arms.split(","):
        raise typer.BadParameter("the oracle is for --engine sim")
    if pool_share and (engine != "sim" or ORACLE in arms.split(",")):
        raise typer.BadParameter("a pool share is for --engine sim without oracle")
    if engine not in ("sim", "toy", "vllm"):
        raise typer.BadParameter(f"engine {engine!r}: expected sim, toy or vllm")
    if half not in ("", "odd", "even"):
        raise typer.BadParameter(f"half {half!r}: expected odd or even")
    options = PluginBenchOptions(
        engine=engine,
        programs=programs,
        rate=rate,
        token_scale=token_scale,
        gap_cap_s=gap_cap,
        seed=seed,
        l1_share=l1_share,
        blocks=blocks,
        pool_share=pool_share,
        arms=tuple(arms.split(",")),
        policy=policy,
        trace=trace,
        half=half,
        uniform=uniform,
        out=out,
        model=model,
    )
    raise typer.Exit(run_plugin_bench(options, Console()))
