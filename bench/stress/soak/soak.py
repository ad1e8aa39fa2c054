"""The soak: a real server, a tiny pool and many agents that misbehave, for minutes."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from bench.command import Folders, option, write_json
from bench.compare.rounds import plain
from bench.serve import tiny_model
from bench.serve.server import ServerOptions, VLLMServer, by_label, parse_metrics, total
from bench.sim.load.programs import Program
from bench.sim.load.scaled import SWE_BENCH, TraceScale, from_trace, synthetic
from bench.stress.soak import report
from bench.stress.soak.agents import (
    ABORT_EXTRA_TOKENS,
    SHARED_TOKENS,
    AgentOptions,
    Fleet,
)
from bench.stress.soak.report import Bounds, Ending, SoakResult
from bench.stress.soak.requests import Requests
from bench.stress.soak.watch import PROBE_VARIABLE, Sample, Watch, read_probe, watch
from bench.tables import checks_table
from ttlcache_connector.plugin import SYNC_SCHEDULER

_PROGRAMS_A_TRACE = 80
_MEAN_CONTEXT_TOKENS = 1_200
_MAX_CONTEXT_TOKENS = 4_000
_REQUEST_TIMEOUT_S = 900.0
#: How long the end may take beyond the longest TTL: the engine must go idle.
_SETTLE_EXTRA_S = 30.0
_POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class SoakOptions(Folders):
    """Sizes of the soak."""

    minutes: float = option(20.0, "How long the agents run.", min=0.1)
    agents: int = option(64, "Concurrent agents.", min=1)
    traces: list[Path] = option(
        [], "Traces to mix (gzip JSON lines); else synthetic agents.", "--trace"
    )
    blocks: int = option(320, "KV pool, in blocks.", min=160)
    """Of 32 tokens: about eight of the agents' contexts."""
    gap_cap_s: float = 3.0
    """Longest tool call in seconds."""
    sample_s: float = option(5.0, "Seconds between two samples.", "--sample", min=0.2)
    max_ttl_s: float = 20.0
    max_queue_wait_s: float = 20.0
    rss_growth_mib: float = option(
        32.0, "Allowed growth per process after warm-up, MiB.", "--rss-growth"
    )
    own_mib: float = option(
        8.0, "Most that ttlcache's own objects may hold, MiB.", "--own"
    )
    seed: int = option(0, "Seed of the agents.")
    out: Path = Path("out/soak")

    def server(self) -> ServerOptions:
        """A server with the default policy; references are checked every step."""
        room = _MAX_CONTEXT_TOKENS + SHARED_TOKENS + ABORT_EXTRA_TOKENS
        return ServerOptions(
            num_blocks=self.blocks,
            max_model_len=-(-room // 32) * 32,
            # vLLM's CPU kernels are compiled per shape, and every batch has another
            # one: by default oneDNN keeps 1,024 of about 0.6 MiB each. That hides
            # any leak of ours for hours, and is the same without us.
            extra_env={
                "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "8",
                PROBE_VARIABLE: str(self.probe_path.absolute()),
            },
            extra_args=("--scheduler-cls", SYNC_SCHEDULER),
            kv_transfer_config={
                "kv_connector": "ProbedTTLConnector",
                "kv_connector_module_path": "bench.stress.soak.probe",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {
                    "max_ttl_s": self.max_ttl_s,
                    "max_queue_wait_s": self.max_queue_wait_s,
                    # Abandoned programs must reach a steady state within minutes.
                    "program_idle_s": 3.0 * self.max_ttl_s,
                    "state_dir": str((self.out / "state").absolute()),
                    "debug_invariants": True,
                },
            },
        )

    @property
    def probe_path(self) -> Path:
        """What the engine's process writes about its memory."""
        return self.out / "own_mib.jsonl"

    def bounds(self) -> Bounds:
        """What is allowed."""
        return Bounds(
            self.agents, self.max_queue_wait_s, self.rss_growth_mib, self.own_mib
        )

    def workload(self) -> tuple[Program, ...]:
        """Programs of all traces in turn; agents take them in this order.

        Raises:
            TraceError: a trace cannot be read.
        """
        if not self.traces:
            share = _MEAN_CONTEXT_TOKENS / SWE_BENCH.tokens.mean
            num = 3 * _PROGRAMS_A_TRACE
            return synthetic(num, 1.0, self.seed, share, self.gap_cap_s)
        scale = TraceScale(
            mean_context_tokens=_MEAN_CONTEXT_TOKENS,
            max_context_tokens=_MAX_CONTEXT_TOKENS,
            gap_cap_s=self.gap_cap_s,
        )
        read = [
            from_trace(path, _PROGRAMS_A_TRACE, 1.0, self.seed, scale)
            for path in self.traces
        ]
        longest = max(len(programs) for programs in read)
        return tuple(
            programs[index % len(programs)]
            for index in range(longest)
            for programs in read
        )


def soak(options: SoakOptions, console: Console) -> int:
    """A real server on a tiny pool under misbehaving agents. Exit status 1: it leaks,
    waits, errs or leaves something unanswered."""
    programs = options.workload()
    options.out.mkdir(parents=True, exist_ok=True)
    options.probe_path.unlink(missing_ok=True)
    model = tiny_model.build(options.model)
    names = [path.name for path in options.traces]
    source = ", ".join(names) or "synthetic (SWE-bench)"
    console.print(
        f"{options.agents} agents for {options.minutes:g} minutes over "
        f"{len(programs)} programs: {source}; KV pool of "
        f"{options.blocks * 32:,} tokens",
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
            result = asyncio.run(_soak(server, programs, options, show))
        progress.update(task, completed=60.0 * options.minutes)
    result = replace(
        result,
        log_errors=tuple(server.errors_in_log()),
        own_mib=tuple(read_probe(options.probe_path)),
    )

    found = report.checks(result, options.bounds())
    path = options.out / "soak.json"
    write_json(path, report.to_json(result, found, plain(asdict(options))))
    console.print(report.load_table(result))
    console.print(checks_table("what must hold", found))
    console.print(f"result: {path}\nlog:    {log_path}", soft_wrap=True)
    return 0 if all(check.ok for check in found) else 1


async def _soak(
    server: VLLMServer,
    programs: tuple[Program, ...],
    options: SoakOptions,
    show: Callable[[Sample, int], None],
) -> SoakResult:
    # A kept connection may be closed by the server just as a gap ends.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(
        base_url=server.base_url, limits=limits, timeout=_REQUEST_TIMEOUT_S
    ) as client:
        stop, seen = asyncio.Event(), Watch()
        requests = Requests(client, "tiny")
        agents = AgentOptions(options.agents, options.seed)
        fleet = Fleet(requests, programs, agents, stop)
        await fleet.prepare()
        began_s = time.monotonic()
        timer = asyncio.get_running_loop().call_later(60.0 * options.minutes, stop.set)
        await asyncio.gather(
            fleet.run(),
            watch(
                client,
                server.pid,
                options.sample_s,
                stop,
                seen,
                lambda sample: show(sample, fleet.tally.answered),
            ),
        )
        timer.cancel()
        ran_s = time.monotonic() - began_s
        ending = await _end(client, requests, options)
    return SoakResult(fleet.tally, seen, ending, (), ran_s)


async def _end(
    client: httpx.AsyncClient, requests: Requests, options: SoakOptions
) -> Ending:
    """Wait for the last pin, then reset, and look at the pool each time."""
    free = [math.nan, math.nan]
    numbers: dict[Any, float] = {}
    with contextlib.suppress(httpx.HTTPError):
        deadline = time.monotonic() + options.max_ttl_s + _SETTLE_EXTRA_S
        for index in range(2):
            while True:
                numbers = await _settled(client, requests)
                free[index] = total(numbers, "ttlcache_free_blocks")
                pool_blocks = total(numbers, "ttlcache_pool_blocks")
                if free[index] == pool_blocks or time.monotonic() > deadline:
                    break
                await asyncio.sleep(_POLL_S)
            if index == 0:
                await client.post("/reset_prefix_cache")
                deadline = time.monotonic() + _SETTLE_EXTRA_S

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
        aged_requests=count("ttlcache_aged_requests_total"),
        hints_rejected=count("ttlcache_hints_rejected_total"),
    )


async def _settled(client: httpx.AsyncClient, requests: Requests) -> dict[Any, float]:
    """All metrics after one more turn: an idle engine neither steps nor reports."""
    body = requests.body([11, 12, 13], 2) | {"stream": False, "stream_options": None}
    body["kv_transfer_params"] = {"ttlcache": {"is_last_step": True}}
    (await client.post("/v1/completions", json=body)).raise_for_status()
    response = await client.get("/metrics")
    response.raise_for_status()
    return parse_metrics(response.text)
