"""The CPU tier: whatever comes, no wrong byte, and never more than its budget."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from bench.sim.harness import EngineSpec
from tests.e2e.tier_bytes.worker import (
    CHUNK_BYTES,
    Worker,
    empty_gpu,
    hints,
    play_random_agents,
    prompt,
)
from ttlcache.errors import ConfigError, TransferError
from ttlcache_connector.blocks import expired
from ttlcache_connector.tiers.cpu import worker


@pytest.fixture
def make_worker() -> Iterator[Any]:
    made: list[Worker] = []

    def make(num_blocks: int = 64, cpu_blocks: int = 100, **extra: Any) -> Worker:
        config = {
            "policy": "fixed",
            "policy_options": {"ttl_s": 0.05},
            "max_pinned_fraction": 1.0,
            "lower_tier": "cpu",
            "cpu_gb": (cpu_blocks + 1) * CHUNK_BYTES / 1e9,
            "demote": "on-expiry",
            **extra,
        }
        spec = EngineSpec(num_blocks=num_blocks, extra_config=config)
        made.append(Worker(spec))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def down(engine: Worker, name: str, seed: int, length: int = 200) -> list[int]:
    """A turn that ends, expires and goes down; its context."""
    context = engine.turn(f"{name}-0", prompt(seed, length), hints=hints(name))
    time.sleep(0.06)
    engine.settle()
    return context


def promoted(engine: Worker) -> int:
    return engine.moved.get("tier_bytes:promoted", 0) // CHUNK_BYTES


def test_a_turn_goes_down_and_comes_back(make_worker):
    engine = make_worker()
    context = down(engine, "a", 1)
    assert engine.moved["tier_bytes:demoted"] == 12 * CHUNK_BYTES
    empty_gpu(engine)
    engine.turn("a-1", [*context, 5], hints=hints("a"))
    assert promoted(engine) == 12
    engine.settle()
    role = engine.connector.scheduler_role
    assert role.parts.controller.telemetry.metrics.totals["reloads", "cpu"] == 1
    # Of the next turn only what is new goes down.
    assert engine.moved["tier_bytes:demoted"] == 13 * CHUNK_BYTES


def test_half_a_hit_in_gpu_memory_half_below(make_worker):
    engine = make_worker()
    context = down(engine, "a", 2)
    empty_gpu(engine)
    engine.turn("b", context[:100], hints=hints("b", last=True))
    engine.turn("a-1", [*context, 5], hints=hints("a", last=True))
    assert promoted(engine) == 6 + 6


def test_the_turn_whose_time_was_over_first_leaves_first(make_worker):
    engine = make_worker(cpu_blocks=24)
    contexts = {name: down(engine, name, seed) for seed, name in enumerate("abc")}
    empty_gpu(engine)
    for name, found in (("c", 12), ("b", 12), ("a", 0)):
        before = promoted(engine)
        engine.turn(
            f"{name}-1",
            [*contexts[name], 5],
            hints=hints(name, last=True),
            max_tokens=1,
        )
        assert promoted(engine) - before == found, name


def test_a_turn_larger_than_the_budget_keeps_its_beginning(make_worker):
    engine = make_worker(cpu_blocks=5)
    context = down(engine, "a", 3)
    empty_gpu(engine)
    engine.turn("a-1", [*context, 5], hints=hints("a", last=True))
    assert promoted(engine) == 5


def test_a_program_that_ended_keeps_nothing(make_worker):
    engine = make_worker()
    context = down(engine, "a", 4)
    tier = engine.connector.scheduler_role.parts.lower.tier
    assert tier.index.used_blocks == 12
    engine.turn("a-1", [*context, 5], hints=hints("a", last=True))
    engine.settle()
    assert tier.index.used_blocks == 0


def test_new_weights_make_what_lies_below_worthless(make_worker):
    engine = make_worker()
    context = down(engine, "a", 5)
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    engine.kv.fill_(-1)
    engine.turn("a-1", [*context, 5], hints=hints("a"))
    assert promoted(engine) == 0
    time.sleep(0.06)
    engine.settle()
    empty_gpu(engine)
    engine.turn("a-2", [*context, 6], hints=hints("a", last=True))
    assert promoted(engine) == 12


def test_an_aborted_request_leaves_nothing_locked(make_worker):
    engine = make_worker()
    context = down(engine, "a", 6)
    empty_gpu(engine)
    for step in range(3):
        engine.add(f"b-{step}", [*context, 5], hints=hints("b"))
        for _ in range(step):
            engine.step()
        engine.abort(f"b-{step}")
    engine.run()
    engine.settle()
    assert engine.pool.get_num_free_blocks() == 63
    engine.connector.scheduler_role.parts.lower.tier.index.clear()
    assert engine.connector.scheduler_role.parts.lower.tier.index.used_blocks == 0


@pytest.mark.parametrize("fault", ["engine", "plan"])
def test_a_copy_that_fails_is_a_prefill(make_worker, monkeypatch, fault):
    engine = make_worker()
    context = down(engine, "a", 7)
    empty_gpu(engine)
    if fault == "engine":
        engine.worker.worker_role._tier._loads.engine.close()
    else:
        monkeypatch.setattr(worker, "plan_copies", refuse)
    engine.turn("a-1", [*context, 5], hints=hints("a", last=True))
    assert promoted(engine) == 0
    engine.settle()
    assert engine.pool.get_num_free_blocks() == 63


def refuse(*_: Any, **__: Any) -> None:
    raise TransferError("no such block")


def test_the_budget_is_never_exceeded(make_worker):
    engine = make_worker(cpu_blocks=10)
    host = engine.worker.worker_role._tier._host
    assert host.shape == (11, CHUNK_BYTES)  # one stands for no block
    for seed in range(5):
        down(engine, f"p{seed}", seed)
        assert engine.connector.scheduler_role.parts.lower.tier.index.used_blocks <= 10


def test_a_budget_of_no_block_is_refused(make_worker):
    with pytest.raises(ConfigError, match=r"cpu_gb.*expected: at least"):
        make_worker(cpu_blocks=0)


@pytest.mark.parametrize("mode", ["on-expiry", "on-pressure", "write-through"])
def test_random_agents_on_a_small_pool(make_worker, monkeypatch, mode):
    """Expiry, claims, victims, preemptions, aborts, a full tier: no wrong byte."""
    monkeypatch.setattr(expired, "COPY_WAIT_S", 0.05)
    engine = make_worker(
        num_blocks=40, cpu_blocks=50, demote=mode, max_pinned_fraction=0.5
    )
    play_random_agents(
        engine, mode, is_enough=lambda number: number >= 60 and promoted(engine) > 50
    )
    assert engine.pool.get_num_free_blocks() == 39
