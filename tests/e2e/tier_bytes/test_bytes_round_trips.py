"""A context goes below and comes back, to the last byte."""

from __future__ import annotations

import time

import pytest

from bench.serve.tier_server import TierServer
from tests.e2e.tier_bytes.worker import (
    BLOCK,
    CHUNK_BYTES,
    WAIT_S,
    Worker,
    empty_gpu,
    hints,
    prompt,
)
from ttlcache_connector.lmcache_server.launch import TierOptions

pytestmark = pytest.mark.e2e


def test_a_round_trip_through_cpu_and_disk(make_worker, tiers):
    engine = make_worker()
    context = engine.turn("a", prompt(1, 200), hints=hints("p"))
    time.sleep(0.25)
    engine.settle()
    assert engine.moved["tier_bytes:demoted"] == 12 * CHUNK_BYTES
    for index, empty in enumerate((lambda: True, tiers.clear_cpu)):
        assert empty()
        empty_gpu(engine)
        # Verified before its first step, see `execute`.
        engine.turn(f"again-{index}", [*context, 5], hints=hints("q", last=True))
        assert engine.moved["tier_bytes:promoted"] == ((index + 1) * 12 * CHUNK_BYTES)
    engine.settle()
    totals = engine.connector.scheduler_role.parts.controller.telemetry.metrics.totals
    assert totals["reloads", "cpu"] == totals["reloads", "disk"] == 1


def test_new_weights_make_what_lies_below_worthless(make_worker, tiers):
    """vLLM's RL flow: after `reset_connector` nothing older is ever loaded."""
    engine = make_worker()
    context = engine.turn("old", prompt(40, 200), hints=hints("w"))
    time.sleep(0.25)
    engine.settle()
    assert engine.moved["tier_bytes:demoted"] == 12 * CHUNK_BYTES
    before = dict(engine.moved)
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    engine.kv.fill_(-1)
    assert tiers.clear_cpu()  # what LMCache keeps on disk is still there
    engine.turn("new", [*context, 5], hints=hints("w"))
    assert engine.moved == before
    # What the new weights made goes below and comes back.
    time.sleep(0.25)
    engine.settle()
    assert engine.moved["tier_bytes:demoted"] > before["tier_bytes:demoted"]
    empty_gpu(engine)
    engine.turn("again", [*context, 6], hints=hints("w", last=True))
    assert engine.moved["tier_bytes:promoted"] == 12 * CHUNK_BYTES


def test_a_request_that_waits_across_a_reset_is_prefilled(make_worker, tiers):
    """Its lookup was under way, or had found KV that is worthless by now."""
    engine = make_worker()
    context = engine.turn("stored", prompt(41, 200), hints=hints("v"))
    time.sleep(0.25)
    engine.settle()
    empty_gpu(engine)
    before = dict(engine.moved)
    adapter = engine.connector.scheduler_role.parts.lower.tier._adapter
    engine.add("waits", [*context, 5], max_tokens=3, hints=hints("v", last=True))
    assert "waits" in adapter._pending_lookups
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    engine.run()
    assert engine.finished["waits"].num_output_tokens == 3
    engine.settle()
    assert engine.moved.get("tier_bytes:promoted") == before.get("tier_bytes:promoted")
    assert not adapter._pending_lookups
    assert tiers.clear_cpu()  # nothing stays locked for a reader who never comes


def test_our_engine_moves_every_byte(make_worker):
    engine = make_worker()
    round_trip(engine, 150)
    moved = engine.moved
    assert moved["tier_mover_bytes:reference"] == 2 * 12 * CHUNK_BYTES


def test_a_server_without_shared_memory(tmp_path, make_worker):
    options = TierOptions(cpu_gb=0.1, chunk_tokens=BLOCK, extra=("--shm-name", ""))
    with TierServer(options, tmp_path / "lmcache.log") as server:
        engine = make_worker(tiers=server)
        round_trip(engine, 152)
        assert engine.moved["tier_mover_bytes:reference"] == 2 * 12 * CHUNK_BYTES
        engine.close()


def round_trip(engine: Worker, seed: int) -> None:
    """A context goes below and comes back; `execute` compares every byte."""
    before = dict(engine.moved)
    context = engine.turn(f"down-{seed}", prompt(seed, 200), hints=hints("p"))
    engine.settle()
    empty_gpu(engine)
    engine.turn(f"up-{seed}", [*context, 5], hints=hints("p", last=True))
    for way in ("demoted", "promoted"):
        key = f"tier_bytes:{way}"
        assert engine.moved[key] - before.get(key, 0) == 12 * CHUNK_BYTES


def test_an_aborted_request_leaves_nothing_locked(make_worker, tiers):
    """LMCache clears only what nobody has reserved for reading."""
    engine = make_worker()
    context = engine.turn("a", prompt(70, 200), hints=hints("locks"))
    time.sleep(0.25)
    engine.settle()
    empty_gpu(engine)
    half = engine.connector.scheduler_role.parts.lower.tier
    request = engine.add("b", [*context, 5], hints=hints("locks"))
    deadline = time.monotonic() + WAIT_S
    while half._adapter.check_lookup_result("b") is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    engine.abort("b")
    engine.run()
    assert request.is_finished()
    assert tiers.clear_cpu()
    for path in tiers.options.disk.glob("*/*"):
        path.unlink()
    promoted = engine.moved.get("tier_bytes:promoted", 0)
    engine.turn("c", [*context, 5], hints=hints("locks", last=True))
    assert engine.moved.get("tier_bytes:promoted", 0) == promoted
