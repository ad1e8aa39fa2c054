"""Hold a context in GPU memory, reload it, or prefill it again: what each costs.

On a real engine above a real LMCache server. For every context length one program's
next turn is timed four ways: its pin claimed, its KV reloaded from CPU memory, from
disk, and prefilled.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.command import Folders, command_line, versions, write_json
from bench.compare.agents import CONNECTOR
from bench.compare.pin_vs_reload_client import PIN_S, WAYS, Client
from bench.serve import tiny_model
from bench.serve.server import ServerOptions, VLLMServer
from bench.serve.tier_server import TierServer
from bench.tables import table
from ttlcache.cli.command import option
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
    console.print(seconds_table(found))
    result = {
        "recoveries": [asdict(recovery) for recovery in found],
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


def seconds_table(recoveries: Sequence[Recovery]) -> Table:
    """Seconds by context length."""
    names = ["context", "MB", "claimed", "CPU", "disk", "prefill"]
    rows = []
    for r in recoveries:
        seconds = (r.claimed_s, r.cpu_s, r.disk_s, r.prefill_s)
        cells = [f"{s:.3f}" for s in seconds]
        rows.append([f"{r.context_tokens:,}", f"{r.kv_bytes / 1e6:.1f}", *cells])
    return table("the next turn, seconds", names, rows, left=0)
