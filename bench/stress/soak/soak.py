"""The soak: a real server, a tiny pool and many agents that misbehave, for minutes."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import httpx
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from bench.command import write_json
from bench.serve import tiny_model
from bench.serve.replay import connect
from bench.serve.server import VLLMServer, by_label, total
from bench.stress.soak import report
from bench.stress.soak.agents import AgentOptions, Fleet
from bench.stress.soak.options import MAX_TTL_S, SoakOptions
from bench.stress.soak.report import Ending, SoakResult
from bench.stress.soak.requests import Tally
from bench.stress.soak.watch import Sample, Watch, read_probe, watch
from bench.tables import checks_table
from ttlcache_sim.load.programs import Program

#: How long the end may take beyond the longest TTL, and a reset: the engine must go
#: idle.
_SETTLE_S = 30.0
_POLL_S = 0.5


def soak(options: SoakOptions, console: Console) -> int:
    """A real server on a tiny pool under misbehaving agents. Exit status 1: it leaks,
    waits, errs or leaves something unanswered."""
    programs = options.workload()
    options.out.mkdir(parents=True, exist_ok=True)
    options.probe_path.unlink(missing_ok=True)
    model = tiny_model.build(options.model)
    console.print(
        f"{options.agents} agents for {options.minutes:g} minutes over "
        f"{len(programs)} programs; KV pool of {options.blocks * 32:,} tokens",
        soft_wrap=True,
    )
    log_path = options.out / "server.log"
    os.environ["VLLM_SERVER_DEV_MODE"] = "1"  # for /reset_prefix_cache
    server = VLLMServer(model, options.server(), log_path)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("starting vLLM (30 s)", total=60.0 * options.minutes)

        def show(sample: Sample, answered: int) -> None:
            text = f"{answered:,} turns, engine {sample.engine_rss_mib:,.0f} MiB"
            progress.update(task, completed=sample.at_s, description=text)

        with server:
            tally, seen, ran_s = asyncio.run(_soak(server, programs, options, show))
            own_mib = read_probe(options.probe_path)
            ending = _end(server)
        progress.update(task, completed=60.0 * options.minutes)
    log_errors = tuple(server.errors_in_log())
    result = SoakResult(tally, seen, ran_s, ending, log_errors, own_mib)

    found = report.checks(result, options)
    path = options.out / "soak.json"
    write_json(path, report.to_json(result, found, asdict(options)))
    console.print(report.load_table(result))
    console.print(checks_table("what must hold", found))
    console.print(f"result: {path}\nlog:    {log_path}", soft_wrap=True)
    return 0 if all(check.ok for check in found) else 1


async def _soak(
    server: VLLMServer,
    programs: tuple[Program, ...],
    options: SoakOptions,
    show: Callable[[Sample, int], None],
) -> tuple[Tally, Watch, float]:
    """What the agents and the watch saw, and for how many seconds."""
    async with connect(server.base_url) as client:
        stop, seen = asyncio.Event(), Watch()
        agents = AgentOptions(options.agents, options.seed)
        fleet = Fleet(client, programs, agents, stop)
        await fleet.prepare()
        began_s = time.monotonic()
        timer = asyncio.get_running_loop().call_later(60.0 * options.minutes, stop.set)
        await asyncio.gather(
            fleet.run(),
            watch(
                client,
                server.pid,
                stop,
                seen,
                lambda sample: show(sample, fleet.tally.answered),
            ),
        )
        timer.cancel()
    return fleet.tally, seen, time.monotonic() - began_s


def _end(server: VLLMServer) -> Ending:
    """Wait for the last pin, then reset, and look at the pool each time."""
    free = [math.nan, math.nan]
    numbers: dict[Any, float] = {}
    with contextlib.suppress(httpx.HTTPError):
        for index, patience_s in enumerate((MAX_TTL_S + _SETTLE_S, _SETTLE_S)):
            if index:
                httpx.post(f"{server.base_url}/reset_prefix_cache", timeout=60.0)
            deadline = time.monotonic() + patience_s
            while free[index] != total(numbers, "ttlcache_pool_blocks"):
                time.sleep(_POLL_S)
                # One more turn: an idle engine neither steps nor reports.
                server.ask([11, 12, 13], {"is_last_step": True}, max_tokens=2)
                numbers = server.metrics()
                free[index] = total(numbers, "ttlcache_free_blocks")
                if time.monotonic() > deadline:
                    break

    def count(name: str) -> float:
        return total(numbers, name) if numbers else math.nan

    return Ending(
        pool_blocks=count("ttlcache_pool_blocks"),
        free_after_ttl=free[0],
        free_after_reset=free[1],
        hook_errors=count("ttlcache_hook_errors_total"),
        retention_enabled=count("ttlcache_retention_enabled"),
        pins=by_label(numbers, "ttlcache_pins_total", "outcome"),
        preemptions=count("vllm:num_preemptions_total"),
        overdue_requests=count("ttlcache_overdue_requests_total"),
        hints_rejected=count("ttlcache_hints_rejected_total"),
    )
