"""Hold a context in GPU memory, reload it, or prefill it again: what each costs.

On a real engine above a real LMCache server. For every context length one program's
next turn is timed four ways: its pin claimed, its KV reloaded from CPU memory, from
disk, and prefilled.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.command import Folders, command_line, option, versions, write_json
from bench.compare.agents import CONNECTOR
from bench.compare.pin_vs_reload_client import PIN_S, WAYS, Client
from bench.serve import tiny_model
from bench.serve.server import ServerOptions, VLLMServer
from bench.serve.tier_server import TierServer
from bench.sim.load.scaled import synthetic
from bench.sim.rivals import published
from bench.tables import table
from ttlcache import policies
from ttlcache.estimators.costs import CostModel
from ttlcache.estimators.gap_history import GapHistory
from ttlcache.policies.base import View
from ttlcache.types import GapKey, Pressure, TurnFacts
from ttlcache_connector.lmcache_server.launch import TierOptions


@dataclass(frozen=True, slots=True)
class PinVsReloadOptions(Folders):
    """Context lengths and repeats."""

    lengths: tuple[int, ...] = option(
        (1024, 2048, 4096, 8192, 16384),
        "Context lengths in tokens, with commas between.",
    )
    repeats: int = option(5, "Timed turns of each kind.", min=1)
    blocks: int = option(640, "KV pool in blocks of 32 tokens.")
    chunk_tokens: int = option(256, "LMCache's chunk.")
    out: Path = Path("out/pin-vs-reload")
    shape: tiny_model.ModelShape = tiny_model.DEFAULT_SHAPE
    extra_args: tuple[str, ...] = ()
    """More arguments of the vLLM server."""
    cpu_gb: float = 1.0
    disk_gb: float = 4.0

    def __post_init__(self) -> None:
        longest, pool_tokens = max(self.lengths), (self.blocks - 1) * 32
        if longest + 64 > pool_tokens:
            raise ValueError(f"--lengths: {longest} does not fit in {pool_tokens}")


@dataclass(frozen=True, slots=True)
class Recovery:
    """Medians of the next turn's seconds at one context length.

    claimed_s: with the KV in GPU memory, what no recovery can beat.
    """

    context_tokens: int
    kv_bytes: int
    claimed_s: float
    cpu_s: float
    disk_s: float
    prefill_s: float


def pin_vs_reload(options: PinVsReloadOptions, console: Console) -> None:
    """Hold, reload from CPU memory or disk, or prefill: the next turn's seconds."""
    tokens, out, shape = sorted(options.lengths), options.out, options.shape
    out.mkdir(parents=True, exist_ok=True)
    os.environ["VLLM_SERVER_DEV_MODE"] = "1"  # /reset_prefix_cache
    below = TierOptions(
        cpu_gb=options.cpu_gb,
        disk=out / "disk",
        disk_gb=options.disk_gb,
        chunk_tokens=options.chunk_tokens,
    )
    with TierServer(below, out / "lmcache.log") as tiers:
        extra = {
            "policy": "fixed",
            "policy_options": {"ttl_s": PIN_S},
            "max_pinned_fraction": 1.0,
            # A timed context is to be below when its pin is over, not when others need
            # its memory.
            "demote": "on-expiry",
            **tiers.options.connector_config(),
        }
        server_options = replace(
            ServerOptions.of_tiny_model(
                options.blocks, {**CONNECTOR, "kv_connector_extra_config": extra}
            ),
            extra_args=options.extra_args,
        )
        model = tiny_model.build(options.model, shape=shape)
        with VLLMServer(model, server_options, out / "server.log") as server:
            client = Client(server, tiers, shape.vocab)
            found = []
            for recovery in measure(
                client, tokens, options.repeats, shape.kv_bytes_per_token
            ):
                found.append(recovery)
                console.print(f"{recovery.context_tokens:,} tokens done")
    agents = synthetic(8, 1.0, 0, 0.08, 5.0)
    gaps_s = [turn.gap_s for program in agents for turn in program.turns[:-1]]
    ttls = policy_ttls(
        found,
        gaps_s,
        Pressure(options.blocks - 1, free_blocks=0, num_running=1, num_waiting=2),
    )
    console.print(seconds_table(found))
    console.print(ttl_table(found, ttls))
    result = {
        "recoveries": [asdict(recovery) for recovery in found],
        "policy_ttls_s": ttls,
        "versions": versions(),
        "machine": f"{os.cpu_count()} cores",
        "command": command_line(),
    }
    write_json(out / "result.json", result)
    console.print(f"results: {out}", soft_wrap=True)


def measure(
    client: Client, lengths: Sequence[int], repeats: int, bytes_per_token: int
) -> Iterator[Recovery]:
    """Time every way back at every length; lengths in ascending order."""
    for tokens in lengths:
        for way in WAYS:
            client.time_next_turn(tokens, way)  # compiles what this length needs
        # In turns: what else the machine does meets every way.
        rounds = [
            [client.time_next_turn(tokens, way) for way in WAYS] for _ in range(repeats)
        ]
        claimed, cpu, disk, prefill = map(statistics.median, zip(*rounds, strict=True))
        yield Recovery(tokens, tokens * bytes_per_token, claimed, cpu, disk, prefill)


def policy_ttls(
    recoveries: Sequence[Recovery], gaps_s: Sequence[float], pressure: Pressure
) -> dict[str, list[tuple[float, ...]]]:
    """Each policy's TTL at each length: without a lower tier, and with CPU memory.

    As a server has it by default (`demote: on-pressure`): the turn is not below yet.
    """
    # Some policies look for the tiers of the cost model: where none is, none is known.
    costs: dict[str | None, CostModel] = {None: CostModel(), "cpu": CostModel()}
    for tier, model in costs.items():
        for _ in range(50):
            for r in recoveries:
                model.observe_prefill(r.context_tokens, 0, max(r.prefill_s, 1e-6))
                if tier is not None:
                    model.observe_reload(tier, r.context_tokens, max(r.cpu_s, 1e-6))
    key = GapKey("bash")
    history = GapHistory()
    for gap_s in gaps_s:
        history.observe(key, gap_s)
    views = [
        View(history, model, pressure=pressure, tier=tier, tier_has_copy=False)
        for tier, model in costs.items()
    ]
    turns = [
        TurnFacts("p", 3, key, r.context_tokens, r.context_tokens // 32)
        for r in recoveries
    ]
    found = {}
    rivals = (policy.name for policy in published.POLICIES)
    for name in (*policies.SHIPPED, *rivals):
        policy = policies.create(name, {"ttl_s": 2.0} if name == "fixed" else {})
        found[name] = [
            tuple(policy.decide(turn, view).ttl_s for view in views) for turn in turns
        ]
    return found


def seconds_table(recoveries: Sequence[Recovery]) -> Table:
    """Seconds by context length."""
    names = ["context", "MB", "claimed", "CPU", "disk", "prefill"]
    rows = []
    for r in recoveries:
        seconds = (r.claimed_s, r.cpu_s, r.disk_s, r.prefill_s)
        cells = [f"{s:.3f}" for s in seconds]
        rows.append([f"{r.context_tokens:,}", f"{r.kv_bytes / 1e6:.1f}", *cells])
    return table("the next turn, seconds", names, rows, left=0)


def ttl_table(
    recoveries: Sequence[Recovery], ttls: Mapping[str, list[tuple[float, ...]]]
) -> Table:
    """What the policies would do: TTL without and with a CPU tier below."""
    lengths = (f"{r.context_tokens:,}" for r in recoveries)
    rows = (
        (name, *(f"{a:.2f} / {b:.2f}" for a, b in pairs))
        for name, pairs in ttls.items()
    )
    return table("TTL, seconds: no tier / CPU tier", ("policy", *lengths), rows)
