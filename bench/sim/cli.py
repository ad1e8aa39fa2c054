"""The command `python -m bench sim`."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from bench.sim.options import SMOKE, SimOptions, run_sim
from bench.sim.settings import EngineSetting
from bench.sim.stride_check import check_strides

_RUN = SimOptions()
_ENGINE = EngineSetting()


def sim(
    workload: Annotated[
        str, typer.Option(help="swe, bfcl, openhands, or trace:PATH.")
    ] = _RUN.workload,
    arms: Annotated[
        str, typer.Option(help='a,b,…; an arm may be varied: NAME:{"key": value}.')
    ] = _RUN.arms,
    programs: Annotated[int, typer.Option(help="How many agents.")] = _RUN.programs,
    rate: Annotated[float, typer.Option(help="Agent arrivals a second.")] = _RUN.rate,
    hardware: Annotated[
        str, typer.Option(help="a100-80, h100, h200 or b200.")
    ] = _ENGINE.hardware,
    model: Annotated[
        str,
        typer.Option(help="llama-3.1-8b, llama-3.1-70b, gemma-3-12b or qwen3-32b."),
    ] = _ENGINE.model,
    blocks: Annotated[int, typer.Option(help="KV pool, in blocks.")] = _ENGINE.blocks,
    block_size: Annotated[
        int, typer.Option(help="Tokens of a block.")
    ] = _ENGINE.block_size,
    offload: Annotated[
        str, typer.Option(help="none, cpu:GB or cpu:GB+ssd:GB.")
    ] = _ENGINE.offload,
    seeds: Annotated[str, typer.Option(help="0,1,2")] = _RUN.seeds,
    out: Annotated[Path | None, typer.Option(help="Results, as JSON.")] = None,
    arrivals: Annotated[
        str,
        typer.Option(
            help="poisson, bursty (CV 2), closed:N, or rollout:N:K: batches of N, the "
            "next one when K % have ended, the cache emptied in between."
        ),
    ] = _RUN.arrivals,
    turn_scale: Annotated[
        int, typer.Option(help="Turns times this, at constant tokens.")
    ] = _RUN.turn_scale,
    max_num_seqs: Annotated[
        int, typer.Option(help="Most running requests.")
    ] = _ENGINE.max_num_seqs,
    max_num_batched_tokens: Annotated[
        int, typer.Option(help="Most tokens of a step: the chunk size.")
    ] = _ENGINE.max_num_batched_tokens,
    half: Annotated[
        str, typer.Option(help="odd or even: only those lines of a trace.")
    ] = _RUN.half,
    chat: Annotated[
        str, typer.Option(help="Chats in the background: path of their trace.")
    ] = _RUN.chat,
    chat_rate: Annotated[
        float, typer.Option(help="Chat arrivals a second.")
    ] = _RUN.chat_rate,
    shared_tokens: Annotated[
        int, typer.Option(help="System prompt that all programs share.")
    ] = _RUN.shared_tokens,
    replicas: Annotated[
        int, typer.Option(help="Engines behind a router.", min=1)
    ] = _RUN.replicas,
    routing: Annotated[
        str,
        typer.Option(
            help="session, sticky, cache-aware, least-loaded, round-robin; a,b,…"
        ),
    ] = _RUN.routing,
    fail_at_s: Annotated[
        float, typer.Option(help="When the busiest replica dies; 0: never.", min=0.0)
    ] = _RUN.fail_s,
    tell_last: Annotated[
        bool, typer.Option(help="Clients say which turn is their last one.")
    ] = _ENGINE.tell_last,
    decode_stride: Annotated[
        int, typer.Option(help="Most steps simulated in one; 1: none.", min=1)
    ] = _ENGINE.decode_stride,
    processes: Annotated[
        int, typer.Option(help="Cells at a time.", min=1)
    ] = _RUN.processes,
    cache: Annotated[
        bool, typer.Option(help="Reuse results of unchanged arguments and code.")
    ] = _RUN.use_cache,
    check: Annotated[
        bool, typer.Option("--check-strides", help="Strides against single steps.")
    ] = False,
    smoke: Annotated[
        bool, typer.Option("--smoke", help="Default arms on a tiny cell, at most 60 s.")
    ] = False,
) -> None:
    """vLLM's own scheduler in virtual time: every rival as an arm. No GPU, no model."""
    console = Console()
    engine = EngineSetting(
        hardware=hardware,
        model=model,
        blocks=blocks,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        offload=offload,
        tell_last=tell_last,
        decode_stride=decode_stride,
    )
    options = SimOptions(
        workload=workload,
        arms=arms,
        programs=programs,
        rate=rate,
        seeds=seeds,
        arrivals=arrivals,
        turn_scale=turn_scale,
        half=half,
        chat=chat,
        chat_rate=chat_rate,
        shared_tokens=shared_tokens,
        replicas=replicas,
        routing=routing,
        fail_s=fail_at_s,
        engine=engine,
        processes=processes,
        use_cache=cache,
    )
    try:
        if not check:
            run_sim(replace(SMOKE, arms=arms) if smoke else options, out, console)
        elif not check_strides(console, processes=processes):
            sys.exit(1)  # typer's own exit is a RuntimeError
    except (ValueError, RuntimeError) as error:
        console.print(
            f"[red]error:[/] {escape(str(error))}", soft_wrap=True, highlight=False
        )
        raise typer.Exit(1) from None
