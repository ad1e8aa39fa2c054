"""A real `lmcache server` whose stores our module admits, and a real client.

No L2: what L1 refuses is lost. Every byte that comes back is compared.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from bench.serve.lmcache_server import LMCacheOptions, LMCacheServer

pytest.importorskip("lmcache", reason="LMCache is an extra")

from bench.lmcache.engine import LMCacheEngine
from ttlcache_lmcache.client import HintClient, read_stats
from ttlcache_lmcache.hints import Hint

pytestmark = pytest.mark.e2e

CHUNK = 32
PATIENCE_S = 60.0


def context(number: int, chunks: int) -> list[int]:
    return [5 + (number * 7919 + i * i * 31) % 2000 for i in range(chunks * CHUNK)]


def test_l1_is_filled_to_its_end_and_what_takes_turns_stays(tmp_path: Path) -> None:
    """Three contexts of half of L1 each take turns: last use would lose them all."""
    options = LMCacheOptions(l1_gb=1 / 64, chunk_tokens=CHUNK, ttl_module={})
    with LMCacheServer(options, tmp_path / "lmcache.log") as server:
        engine = LMCacheEngine(server.url, CHUNK, hidden=128)
        size = server.status()["storage_manager"]["l1_usage"][1]
        chunks = int(size / engine.chunk_bytes / 2)
        prompts = [context(number, chunks) for number in range(3)]
        hits = 0
        for round_ in range(6):
            for prompt in prompts:
                found = engine.turn(prompt, [])
                hits += found if round_ >= 3 else 0
        status = server.status()
        used, total = status["storage_manager"]["l1_usage"]
        assert used > 0.95 * total, "LMCache alone keeps a fifth of it empty"
        assert hits >= 0.4 * 9 * len(prompts[0])
        ours = status["ttlcache"]
        assert ours["errors"] == {}
        assert ours["counts"]["refused"] > 0

        # A finished program makes room at once, with no look in between.
        client = HintClient(engine.client)
        for number, prompt in enumerate(prompts):
            client.send([Hint(request_id=f"last-{number}", is_last_step=True)])
            engine.turn(prompt, [], request_id=f"last-{number}")
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            stats = read_stats(engine.client, timeout_s=PATIENCE_S)
            if stats["counts"].get("programs_finished", 0) >= 3:
                break
            time.sleep(0.05)
        new = context(9, 2 * chunks)
        engine.turn(new, [])
        assert engine.turn(new, []) >= 0.95 * len(new)
        engine.close()
