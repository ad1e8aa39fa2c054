"""A context goes below and comes back, to the last byte."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace
from pathlib import Path

import pytest

from bench.serve.tier_server import TierServer
from tests.e2e.tier_bytes.worker import (
    BLOCK,
    CHUNK_BYTES,
    WAIT_S,
    Worker,
    empty_gpu,
    hints,
    play_random_agents,
    prompt,
    step_until,
)
from tests.waiting import becomes
from ttlcache.errors import ConfigError
from ttlcache_connector.blocks import unpinned_turns
from ttlcache_connector.lmcache_server.launch import TierOptions

pytestmark = pytest.mark.e2e


TURN_BYTES = 12 * CHUNK_BYTES


def goes_below(engine: Worker, program: str, seed: int) -> list[int]:
    """The context of a program's first turn, once the server has it."""
    before = engine.moved.get("tier_bytes:demoted", 0)
    context = engine.turn(f"{program}-1", prompt(seed, 200), hints=hints(program))
    engine.settle()
    assert engine.moved["tier_bytes:demoted"] - before == TURN_BYTES
    return context


def promoted(engine: Worker) -> int:
    return engine.moved.get("tier_bytes:promoted", 0)


def test_a_round_trip_through_cpu_and_disk(make_worker, tiers):
    """Every byte by our engine."""
    engine = make_worker()
    context = goes_below(engine, "p", 1)
    for index, empty in enumerate((lambda: True, tiers.clear_cpu)):
        assert empty()
        empty_gpu(engine)
        # Verified before its first step, see `execute`.
        engine.turn(f"again-{index}", [*context, 5], hints=hints("q", last=True))
        assert promoted(engine) == (index + 1) * TURN_BYTES
    engine.settle()
    totals = engine.connector.scheduler_role.parts.controller.telemetry.metrics.totals
    assert totals["reloads", "lmcache"] == 2
    assert sum(engine.moved.values()) == 3 * TURN_BYTES


def test_what_one_request_loads_others_wait_for_and_share(make_worker, tiers):
    engine = make_worker(num_blocks=200)
    context = goes_below(engine, "one", 31)
    empty_gpu(engine)
    before = engine.moved.get("tier_bytes:promoted", 0)
    names = [f"share-{number}" for number in range(4)]
    for name in names:
        engine.add(name, [*context, 9], hints=hints(name, last=True))
    step_until(engine, lambda: all(name in engine.finished for name in names))
    assert engine.moved["tier_bytes:promoted"] - before == TURN_BYTES


def test_a_server_without_shared_memory_ends_the_start(tmp_path, make_worker):
    options = TierOptions(
        cpu_gb=0.1, chunk_tokens=BLOCK, server_args=["--shm-name", ""]
    )
    with (
        TierServer(options, tmp_path / "lmcache.log") as server,
        pytest.raises(ConfigError, match=r"shares no memory.*lmcache_driven"),
    ):
        make_worker(tiers=server)


def test_a_request_that_waits_across_a_reset_is_prefilled(make_worker, tiers):
    """Its lookup was under way, or had found KV that is worthless by now."""
    engine = make_worker()
    context = goes_below(engine, "v", 41)
    empty_gpu(engine)
    adapter = engine.connector.scheduler_role.parts.lower.tier._adapter
    engine.add("waits", [*context, 5], max_tokens=3, hints=hints("v", last=True))
    assert "waits" in adapter._pending_lookups
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    engine.run()
    assert engine.finished["waits"].num_output_tokens == 3
    engine.settle()
    assert promoted(engine) == 0
    assert not adapter._pending_lookups
    assert tiers.clear_cpu()  # nothing stays locked for a reader who never comes


def test_an_aborted_request_leaves_nothing_locked(make_worker, tiers):
    """LMCache clears only what nobody has reserved for reading."""
    engine = make_worker()
    context = goes_below(engine, "locks", 70)
    empty_gpu(engine)
    half = engine.connector.scheduler_role.parts.lower.tier
    request = engine.add("b", [*context, 5], hints=hints("locks"))
    found = half._adapter.check_lookup_result
    assert becomes(lambda: found("b") is not None, WAIT_S)
    engine.abort("b")
    engine.run()
    assert request.is_finished()
    assert tiers.clear_cpu()
    for path in tiers.options.disk.glob("*/*"):
        path.unlink()
    before = promoted(engine)
    engine.turn("c", [*context, 5], hints=hints("locks", last=True))
    assert promoted(engine) == before


# --- whatever comes: random agents, a server that dies


@pytest.mark.parametrize(
    ("mode", "server"),
    [
        ("on-expiry", "tiers"),
        ("on-pressure", "tiers"),
        ("on-pressure", "two_block_tiers"),
        ("write-through", "tiers"),
    ],
)
def test_random_agents_on_a_small_pool(make_worker, monkeypatch, request, mode, server):
    """Expiry, claims, victims, preemptions, aborts: whatever comes, no wrong byte."""
    monkeypatch.setattr(unpinned_turns, "COPY_WAIT_S", 0.05)
    engine = make_worker(
        num_blocks=40,
        ttl_s=0.05,
        tiers=request.getfixturevalue(server),
        demote=mode,
        max_pinned_fraction=0.5,  # some pins hold a part of their turn only
    )
    both = {"tier_bytes:demoted", "tier_bytes:promoted"}
    # Contexts of their own: what an earlier case left below would be found. On a fast
    # machine the first rounds are over before a pin expires.
    play_random_agents(
        engine,
        mode,
        first_seed=200 * len(mode),
        is_enough=lambda number: number >= 40 and both <= engine.moved.keys(),
    )
    assert engine.pool.get_num_free_blocks() == 39


def test_a_server_that_stood_still_writes_nothing_late(make_worker, tiers):
    """Nor into blocks that others have by then, where LMCache's own copier does."""
    engine = make_worker(num_blocks=30, **{"lmcache.mp.heartbeat_interval": 1.0})
    context = goes_below(engine, "still", 160)
    empty_gpu(engine)
    engine.add("late", [*context, 5], max_tokens=2, hints=hints("still", last=True))
    found = engine.connector.scheduler_role.parts.lower.tier._adapter
    assert becomes(lambda: found.check_lookup_result("late") is not None, WAIT_S)
    tiers.pause()
    try:
        engine.step()
        loads = engine.worker.worker_role.tier._adapter.retrieve_futures
        assert "late" in loads, "its load is under way"
        step_until(engine, lambda: "late" in engine.finished)
        for seed in range(3):
            last = hints(f"other-{seed}", last=True)
            engine.add(f"o{seed}", prompt(seed, 120), max_tokens=60, hints=last)
        engine.step()
    finally:
        tiers.resume()
    step_until(engine, lambda: {"o0", "o1", "o2"} <= engine.finished.keys())
    up = engine.connector.scheduler_role.parts.lower.is_up
    assert becomes(up, WAIT_S)


@pytest.mark.parametrize("fault", ["load", "order"])
def test_a_load_that_fails_takes_nothing_from_a_request_that_runs(
    make_worker, two_block_tiers, monkeypatch, fault
):
    """They share a block in the middle of a chunk. Blocks are free for others then."""
    engine = make_worker(num_blocks=80, tiers=two_block_tiers)
    context = engine.turn("below", prompt(170, 200), hints=hints("below"))
    engine.settle()
    empty_gpu(engine)
    tokens = [*context[: 3 * BLOCK], *prompt(171, 20)]
    running = engine.add("runs", tokens, max_tokens=400, hints=hints("r", last=True))
    step_until(engine, lambda: running.num_output_tokens)
    half = engine.connector.scheduler_role.parts.lower.tier
    late = engine.add("late", [*context, 5], max_tokens=2, hints=hints("late"))
    assert becomes(
        lambda: half._adapter.check_lookup_result("late") is not None, WAIT_S
    )
    two_block_tiers.pause()
    loads = engine.worker.worker_role.tier._adapter.retrieve_futures
    try:
        with monkeypatch.context() as patch:
            if fault == "order":
                engine.on_step = None  # the fault is counted
                patch.setattr(half._lookups, "end", None)
            engine.step()
        assert late.status.name == "WAITING_FOR_REMOTE_KVS"
        assert ("late" in loads) == (fault == "load")
        if fault == "load":
            loads["late"][0].set_result(False)
        computed = running.num_computed_tokens
        while not late.is_finished():
            engine.step()
            assert running.is_finished() or running.num_computed_tokens > computed
            computed = running.num_computed_tokens
        assert "late" not in loads
    finally:
        two_block_tiers.resume()
    step_until(engine, running.is_finished)


def test_a_server_that_dies_under_way(make_worker, tiers):
    """Loads fail, tokens are computed, nothing is wrong and nothing hangs."""
    engine = make_worker(num_blocks=200, **{"lmcache.mp.mq_timeout": 1.0})
    contexts = [
        engine.turn(f"first-{i}", prompt(500 + i, 100), hints=hints(f"d{i}"))
        for i in range(8)
    ]
    engine.settle()
    empty_gpu(engine)
    for index, context in enumerate(contexts):
        engine.add(f"next-{index}", [*context, 9], hints=hints(f"d{index}", last=True))
    engine.step()
    tiers.kill()
    step_until(engine, lambda: all(f"next-{i}" in engine.finished for i in range(8)))
    assert engine.pool.get_num_free_blocks() == 199
    tiers.start()
    assert becomes(engine.connector.scheduler_role.parts.lower.is_up, WAIT_S)
    # The two roles notice each for itself that the server is back.
    assert becomes(lambda: goes_down_and_comes_back(engine), 3 * WAIT_S)


NUMBERS = itertools.count()


def goes_down_and_comes_back(engine: Worker) -> bool:
    """Whether a turn does, by way of LMCache."""
    promoted, number = engine.moved.get("tier_bytes:promoted", 0), next(NUMBERS)
    context = engine.turn(f"back-{number}", prompt(900, 100), hints=hints("back"))
    engine.settle()
    empty_gpu(engine)
    engine.turn(f"again-{number}", [*context, 9], hints=hints("back", last=True))
    return engine.moved.get("tier_bytes:promoted", 0) > promoted


def test_a_server_that_came_anew_before_the_first_copy(make_worker, two_block_tiers):
    """It knows no worker, and answers none that it does not know."""
    engine = make_worker(
        num_blocks=200, tiers=two_block_tiers, **{"lmcache.mp.mq_timeout": 1.0}
    )
    two_block_tiers.kill()
    two_block_tiers.start()
    assert becomes(lambda: goes_down_and_comes_back(engine), 3 * WAIT_S)


def test_a_server_that_comes_back_with_other_chunks(make_worker, two_block_tiers):
    """Nothing is stored there: its keys would hold other tokens."""
    extra = {"lmcache.mp.mq_timeout": 1.0}
    engine = make_worker(num_blocks=200, tiers=two_block_tiers, **extra)
    assert goes_down_and_comes_back(engine)
    before = two_block_tiers.command
    two_block_tiers.kill()
    other = replace(two_block_tiers.options, chunk_tokens=BLOCK)
    two_block_tiers.command = other.command()
    two_block_tiers.start()
    try:
        moved = dict(engine.moved)
        for _ in range(3):
            time.sleep(1.0)
            goes_down_and_comes_back(engine)
        assert engine.moved == moved
    finally:
        two_block_tiers.kill()
        two_block_tiers.command = before
        two_block_tiers.start()


def maps_memory_of(server: TierServer, engine: Worker) -> bool:
    engine.step()
    return str(server.options.shm_name) in Path("/proc/self/maps").read_text()


def test_turns_of_an_outage_leave_nothing_behind(make_worker, two_block_tiers):
    engine = make_worker(tiers=two_block_tiers, **{"lmcache.mp.mq_timeout": 1.0})
    assert goes_down_and_comes_back(engine)
    assert maps_memory_of(two_block_tiers, engine)
    half = engine.connector.scheduler_role.parts.lower.tier
    two_block_tiers.kill()
    try:
        assert becomes(lambda: not half.is_up(), 2 * WAIT_S)
        for number in range(5):
            engine.turn(f"out-{number}", prompt(number, 90), hints=hints(f"p{number}"))
            engine.settle()  # its pin expires
        assert becomes(lambda: not maps_memory_of(two_block_tiers, engine), WAIT_S)
        assert not half._queue._pending
        assert not half._inner._lazy_offload_manager._token_ledgers
    finally:
        two_block_tiers.start()
