"""Our LMCache plugins against LMCache's own eviction policies, on real servers.

Every arm is a fresh `lmcache server` whose L1 holds a share of the workload's working
set. The engine is vLLM on its CPU backend with LMCache's own connector, or (`toy`) a
client that speaks LMCache's protocol and has no model: the same lookups and stores
without the minutes of prefill. `sim` has no server either: LMCache's policy objects and
our tier in virtual time, for many seeds.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.command import TINY_MODEL, command_line, one_of, write_json
from bench.serve import tiny_model
from bench.serve.arms import Arm, run_arm
from bench.serve.lmcache_server import LMCacheOptions, LMCacheServer
from bench.serve.replay import ReplayOptions, new_token_ids
from bench.serve.scaled import SWE_BENCH, TraceScale, from_trace, synthetic
from bench.serve.server import ServerOptions
from ttlcache.cli.command import option
from ttlcache_sim.load.programs import Program, Turn

#: Floats a token, layer and half of the toy's KV: 4 KiB a token.
_TOY_HIDDEN = 256
#: The stock policies and ours; `ttl` is LRU's server with our module.
ARMS = ("LRU", "ARC", "ttl")
#: Only in the simulation: Belady's rule, which knows every lookup to come.
ORACLE = "oracle"
#: Seconds that a turn takes in the simulation.
SIM_SERVICE_S = 1.0
_UNIFORM_CONTEXTS = 24
_UNIFORM_TURNS = 240


@dataclass(frozen=True, slots=True)
class PluginBenchOptions:
    """What to run; the defaults take about three minutes with the toy engine."""

    engine: str = option("toy", "sim (no server), toy (no model) or vllm (CPU).")
    programs: int = option(12, "", min=1)
    rate: float = option(1.0, "Arrivals a second.")
    token_scale: float = option(0.08, "")
    gap_cap_s: float = option(10.0, "Seconds.", "--gap-cap")
    seed: int = option(0, "")
    l1_share: float = option(0.5, "L1 as a share of the working set.")
    """See `working_set_bytes`."""
    chunk_tokens: int = 64
    blocks: int = option(384, "KV pool of vLLM, in blocks of 32 tokens.", min=16)
    pool_share: float = option(0.0, "Pool of the engine, of L1 (sim).", min=0)
    arms: tuple[str, ...] = option(
        ARMS, "Of LRU, ARC, IsolatedLRU, ttl, oracle (sim); by comma."
    )
    trace: Path | None = option(None, "Replay this trace.")
    half: str = option("", "Lines of the trace: odd or even; all if empty.")
    uniform: bool = option(False, "Contexts drawn at random: nothing to learn.")
    out: Path = option(Path("out/lmcache-plugin"), "")
    model: Path = option(TINY_MODEL, "")

    def __post_init__(self) -> None:
        one_of("engine", self.engine, ("sim", "toy", "vllm"))
        one_of("half", self.half, ("", "odd", "even"))
        if self.engine != "sim" and ORACLE in self.arms:
            raise ValueError("the oracle is for --engine sim")
        if self.pool_share and (self.engine != "sim" or ORACLE in self.arms):
            raise ValueError("a pool share is for --engine sim without oracle")

    def workload(self) -> tuple[Program, ...]:
        if self.uniform:
            return uniform(self.seed, round(SWE_BENCH.tokens.mean * self.token_scale))
        if self.trace is None:
            return synthetic(
                self.programs, self.rate, self.seed, self.token_scale, self.gap_cap_s
            )
        scale = TraceScale(
            mean_context_tokens=round(SWE_BENCH.tokens.mean * self.token_scale),
            max_context_tokens=(self.blocks - 1) * 32,
            gap_cap_s=self.gap_cap_s,
        )
        return from_trace(
            self.trace, self.programs, self.rate, self.seed, scale, self.half
        )

    @property
    def kv_bytes_per_token(self) -> int:
        if self.engine == "toy":
            return 4 * _TOY_HIDDEN * 4
        return tiny_model.DEFAULT_SHAPE.kv_bytes_per_token


@dataclass(frozen=True, slots=True)
class PluginArmResult:
    """What one arm served."""

    name: str
    prompt_tokens: int
    cached_tokens: int
    turns: int
    seconds: float
    status: dict[str, Any]
    problems: tuple[str, ...] = ()
    gpu_tokens: int = 0
    """Of the cached tokens, those that were in the engine's own pool."""

    @property
    def is_stock(self) -> bool:
        """One of LMCache's own policies."""
        return self.name not in ("ttl", ORACLE)

    @property
    def lmcache_hit(self) -> float:
        """What LMCache had, of what the engine's own pool had not."""
        asked = self.prompt_tokens - self.gpu_tokens
        return (self.cached_tokens - self.gpu_tokens) / asked if asked else 0.0

    @property
    def prompt_hit(self) -> float:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


def uniform(seed: int, tokens: int) -> tuple[Program, ...]:
    """One program a request; its prompt is one of a few contexts, drawn at random."""
    rng = random.Random(f"{seed}/uniform")
    programs = []
    for index in range(_UNIFORM_TURNS):
        which = rng.randrange(_UNIFORM_CONTEXTS)
        turn = Turn(tokens, 4, "", 0.0)
        programs.append(Program(f"uniform-{which}", index * 0.25, (turn,)))
    return tuple(programs)


def working_set_bytes(programs: Sequence[Program], options: PluginBenchOptions) -> int:
    """KV of all programs under way, at the moment when that is most.

    A program is under way from its arrival to its end if no turn took any time, and
    counts with its final context.
    """
    lives = []
    for program in programs:
        length_s = sum(turn.gap_s for turn in program.turns)
        end_s = program.arrival_s + length_s
        lives.append((program.arrival_s, end_s, program.context_tokens))
    if options.uniform:
        final = {p.program_id: p.context_tokens for p in programs}
        return sum(final.values()) * options.kv_bytes_per_token
    most = max(
        sum(size for start, end, size in lives if start <= at <= end)
        for at, _, _ in lives
    )
    return most * options.kv_bytes_per_token


def lmcache_plugin(options: PluginBenchOptions, console: Console) -> int:
    """LMCache with our server module against its own eviction policies."""
    programs = options.workload()
    options.out.mkdir(parents=True, exist_ok=True)
    l1_gb = working_set_bytes(programs, options) * options.l1_share / 2**30
    console.print(
        f"{len(programs)} programs, L1 {l1_gb * 1024:.0f} MiB, engine {options.engine}"
    )
    run = _run_sim if options.engine == "sim" else _run
    results = [run(name, programs, l1_gb, options) for name in options.arms]
    table = Table("arm", "prompt hit", "of best", "LMCache", "of best")
    for title in ("turns", "seconds", "problems"):
        table.add_column(title)
    for each in results:
        table.add_row(
            each.name,
            f"{each.prompt_hit:.3f}",
            _of_best(each.prompt_hit, [r.prompt_hit for r in results if r.is_stock]),
            f"{each.lmcache_hit:.3f}",
            _of_best(each.lmcache_hit, [r.lmcache_hit for r in results if r.is_stock]),
            str(each.turns),
            f"{each.seconds:.0f}",
            str(len(each.problems)),
        )
    console.print(table)
    for each in results:
        for problem in each.problems[:5]:
            console.print(f"{each.name}: {problem}", markup=False)
    result = {
        "arms": [
            {**asdict(r), "prompt_hit": r.prompt_hit, "lmcache_hit": r.lmcache_hit}
            for r in results
        ],
        "l1_gb": l1_gb,
        "cpu_count": os.cpu_count(),
        "command": command_line(),
        "options": {k: str(v) for k, v in asdict(options).items()},
    }
    write_json(options.out / "result.json", result)
    return 1 if any(each.problems for each in results) else 0


def _of_best(hit: float, stock: Sequence[float]) -> str:
    best = max(stock, default=0.0)
    return f"{hit / best:.2f}x" if best else "-"


def _run(
    name: str, programs: Sequence[Program], l1_gb: float, options: PluginBenchOptions
) -> PluginArmResult:
    ours = name == "ttl"
    server = LMCacheServer(
        LMCacheOptions(
            l1_gb=l1_gb,
            chunk_tokens=options.chunk_tokens,
            eviction_policy="LRU" if ours else name,
            ttl_module={} if ours else None,
        ),
        options.out / f"lmcache-{name}.log",
    )
    server.log_path.unlink(missing_ok=True)
    with server:
        run = _run_toy if options.engine == "toy" else _run_vllm
        return run(name, server, programs, options)


def _run_sim(
    name: str, programs: Sequence[Program], l1_gb: float, options: PluginBenchOptions
) -> PluginArmResult:
    from bench.lmcache.oracle import Oracle
    from bench.lmcache.sim import Simulation

    chunk_bytes = options.kv_bytes_per_token * options.chunk_tokens
    capacity = int(l1_gb * 2**30 / chunk_bytes)
    pool_chunks = int(options.pool_share * capacity)
    sim = (
        Oracle(capacity, options.chunk_tokens)
        if name == ORACLE
        else Simulation(name, capacity, options.chunk_tokens, pool_chunks)
    )
    found = sim.run(programs, options.seed, SIM_SERVICE_S)
    return PluginArmResult(
        name,
        found.prompt_tokens,
        found.cached_tokens,
        found.turns,
        sim.clock.now_s(),
        {"dropped_chunks": found.dropped_chunks},
        gpu_tokens=found.pool_tokens,
    )


def _run_toy(
    name: str,
    server: LMCacheServer,
    programs: Sequence[Program],
    options: PluginBenchOptions,
) -> PluginArmResult:
    from bench.lmcache.engine import LMCacheEngine

    engine = LMCacheEngine(server.url, options.chunk_tokens, _TOY_HIDDEN)
    tokens = ReplayOptions(seed=options.seed)
    lock = threading.Lock()
    served: list[tuple[int, int]] = []
    problems: list[str] = []
    start_s = time.monotonic()

    def play(program: Program) -> None:
        time.sleep(max(0.0, program.arrival_s - (time.monotonic() - start_s)))
        context: list[int] = []
        try:
            for index, turn in enumerate(program.turns):
                context += new_token_ids(program.program_id, index, turn, tokens)
                output = [(index * 31 + i) % 2000 for i in range(turn.output_tokens)]
                with lock:  # one engine serves one request at a time
                    found = engine.turn(context, output, check=False)
                    served.append((len(context), found))
                context += output
                time.sleep(turn.gap_s)
        except Exception as error:  # noqa: BLE001 - reported with the result
            problems.append(f"{program.program_id}: {type(error).__name__}: {error}")

    threads = [threading.Thread(target=play, args=(p,)) for p in programs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    status = server.status().get("ttlcache", {})
    engine.close()
    return PluginArmResult(
        name,
        sum(prompt for prompt, _ in served),
        sum(found for _, found in served),
        len(served),
        time.monotonic() - start_s,
        status,
        tuple(problems),
    )


def _run_vllm(
    name: str,
    server: LMCacheServer,
    programs: Sequence[Program],
    options: PluginBenchOptions,
) -> PluginArmResult:
    model = tiny_model.build(options.model)
    arm = Arm(
        name,
        ServerOptions.of_tiny_model(options.blocks, stock_connector(server)),
    )
    result = run_arm(
        arm,
        model,
        programs,
        ReplayOptions(seed=options.seed, hints=False),
        options.out / f"vllm-{name}.log",
    )
    return PluginArmResult(
        name,
        result.summary.prompt_tokens,
        result.summary.cached_tokens,
        result.summary.num_turns,
        result.replay_s,
        server.status().get("ttlcache", {}),
        tuple(str(failure) for failure in result.failures),
        # A request that is preempted asks LMCache twice.
        max(0, result.summary.cached_tokens - round(result.engine.lower_tier_hits)),
    )


def stock_connector(server: LMCacheServer) -> dict[str, Any]:
    """LMCache's own connector for vLLM, not ours, with what an agent needs."""
    return {
        "kv_connector": "LMCacheMPConnector",
        "kv_connector_module_path": ("lmcache.integration.vllm.lmcache_mp_connector"),
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "lmcache.mp.host": "tcp://127.0.0.1",
            "lmcache.mp.port": server.port,
            "lmcache.mp.mq_timeout": 30,
            "lmcache.mp.save_decode_cache": True,
        },
    }
