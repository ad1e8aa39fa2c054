"""`python -m bench pin-vs-reload`."""

from __future__ import annotations

import json
import os
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def pin_vs_reload(
    lengths: Annotated[
        str, typer.Option(help="Context lengths in tokens, with commas between.")
    ] = "1024,2048,4096,8192,16384",
    repeats: Annotated[int, typer.Option(help="Timed turns of each kind.", min=1)] = 5,
    rounds: Annotated[
        int, typer.Option(help="Pairs of replays that price a held context.", min=0)
    ] = 5,
    programs: Annotated[int, typer.Option(help="Programs of those replays.")] = 8,
    rate: Annotated[float, typer.Option(help="Their arrivals per second.")] = 1.0,
    blocks: Annotated[int, typer.Option(help="KV pool in blocks of 32 tokens.")] = 640,
    chunk_tokens: Annotated[int, typer.Option(help="LMCache's chunk.")] = 256,
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path(
        "out/pin-vs-reload"
    ),
    model: Annotated[Path, typer.Option(help="Folder of the tiny model.")] = Path(
        "out/models/tiny"
    ),
) -> None:
    """Hold, reload from CPU memory or disk, or prefill: seconds and break-even gaps."""
    from bench.compare import demo_report
    from bench.compare import pin_vs_reload as bench
    from bench.compare.demo import CONNECTOR
    from bench.compare.pin_vs_reload_client import HOLD_S, Client
    from bench.serve import tiny_model
    from bench.serve.server import ServerOptions, VLLMServer
    from bench.serve.tier_server import TierServer
    from bench.sim.workloads import synthetic
    from ttlcache.types import Pressure
    from ttlcache_connector.lmcache_server.launch import TierOptions

    console = Console()
    tokens = sorted(int(part) for part in lengths.split(","))
    room = (blocks - 1) * 32
    if tokens[-1] + 64 > room:
        raise typer.BadParameter(f"--lengths: {tokens[-1]} does not fit in {room}")
    out.mkdir(parents=True, exist_ok=True)
    os.environ["VLLM_SERVER_DEV_MODE"] = "1"  # /reset_prefix_cache
    shape = tiny_model.DEFAULT_SHAPE
    load = synthetic(programs, rate, 0, 0.08, 5.0)
    gaps_s = [turn.gap_s for program in load for turn in program.turns[:-1]]
    options = TierOptions(
        cpu_gb=1.0, disk=out / "disk", disk_gb=4.0, chunk_tokens=chunk_tokens
    )
    with TierServer(options, out / "lmcache.log") as tiers:
        extra = {
            "policy": "fixed",
            "policy_options": {"ttl_s": HOLD_S},
            "max_pinned_fraction": 1.0,
            # A timed context is to be below when its pin is over, not when others need
            # its memory.
            "demote": "on-expiry",
            **tiers.options.connector_config(),
        }
        server_options = ServerOptions(
            num_blocks=blocks,
            max_model_len=min(room, shape.max_position),
            kv_transfer_config={**CONNECTOR, "kv_connector_extra_config": extra},
        )
        model = tiny_model.build(model)
        with VLLMServer(model, server_options, out / "server.log", 600.0) as server:
            client = Client(server, tiers, shape.vocab)
            found = []
            for recovery in bench.measure(
                client, tokens, repeats, shape.kv_bytes_per_token
            ):
                found.append(recovery)
                console.print(f"{recovery.context_tokens:,} tokens done")
            held = max(t for t in tokens if t <= room // 3 or t == tokens[0])
            pairs = bench.hold_costs_per_byte(
                server, client, load, held, held * shape.kv_bytes_per_token, rounds
            )
    price = bench.price_of(pairs)
    if price is not None:
        found = [bench.priced(recovery, price) for recovery in found]
    pressure = Pressure(
        pool_blocks=blocks - 1, free_blocks=0, num_running=1, num_waiting=2
    )
    ttls = bench.policy_ttls(found, gaps_s, pressure)
    console.print(bench.table(found))
    console.print(
        f"held: {held:,} of {room:,} tokens during {rounds} pairs of replays of "
        f"{programs} programs, {rate:g} arrivals/s"
    )
    console.print(bench.ttl_table(found, ttls))
    bench.write_csv(found, out / "result.csv")
    bench.plot(found, out / "plot.png")
    result = {
        "recoveries": [asdict(recovery) for recovery in found],
        "hold_pairs_job_seconds_per_byte_second": pairs,
        "held_tokens": held,
        "held_bytes": held * shape.kv_bytes_per_token,
        "pool_tokens": room,
        "programs": programs,
        "rate": rate,
        "repeats": repeats,
        "policy_ttls_s": ttls,
        "versions": demo_report.versions(),
        "cpu_count": os.cpu_count(),
        "machine": f"{os.cpu_count()} cores",
        "command": shlex.join(["python", "-m", "bench", *sys.argv[1:]]),
    }
    (out / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    console.print(f"results: {out}", soft_wrap=True)
