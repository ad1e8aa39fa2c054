"""Workers above a real LMCache server."""

from __future__ import annotations

from typing import Any

import pytest

from bench.serve.tier_server import TierServer
from tests.e2e.tier_bytes.worker import BLOCK, CHUNK_BYTES, WAIT_S, Worker
from ttlcache.transfer import reference
from ttlcache_connector.lmcache_server.launch import TierOptions
from ttlcache_sim.harness import EngineSpec


@pytest.fixture(scope="module")
def tiers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bytes")
    options = TierOptions(
        cpu_gb=0.1, disk=folder / "disk", disk_gb=1.0, chunk_tokens=BLOCK
    )
    with TierServer(options, folder / "lmcache.log") as server:
        yield server


@pytest.fixture(scope="module")
def two_block_tiers(tmp_path_factory):
    """One in which a pin may end within a chunk."""
    options = TierOptions(cpu_gb=0.1, chunk_tokens=2 * BLOCK)
    log = tmp_path_factory.mktemp("bytes2") / "lmcache.log"
    with TierServer(options, log) as server:
        yield server


@pytest.fixture
def make_worker(tiers, monkeypatch):
    made: list[Worker] = []
    # Several parts a request.
    monkeypatch.setattr(reference, "PART_BYTES", 5 * CHUNK_BYTES)

    def make(
        num_blocks: int = 64,
        ttl_s: float = 0.2,
        tiers: TierServer = tiers,
        **extra: Any,
    ) -> Worker:
        config = {
            "policy": "fixed",
            "policy_options": {"ttl_s": ttl_s},
            "max_pinned_fraction": 1.0,
            "demote": "on-expiry",  # nobody needs the memory in most of these tests
            "lmcache.mp.mq_timeout": WAIT_S,  # a busy machine is no outage
            **tiers.options.connector_config(),
            **extra,
        }
        spec = EngineSpec(num_blocks=num_blocks, extra_config=config)
        made.append(Worker(spec))
        return made[-1]

    yield make
    for worker in made:
        worker.close()
