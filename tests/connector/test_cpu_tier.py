"""The CPU tier: whatever comes, no wrong byte, and never more than its budget."""

from __future__ import annotations

import gc
import itertools
import logging
import time
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform

from tests.connector.fake_tier import extra
from tests.e2e.tier_bytes.worker import (
    CHUNK_BYTES,
    Worker,
    empty_gpu,
    hints,
    play_random_agents,
    prompt,
    step_until,
    use_free_memory,
)
from ttlcache.config import load_config
from ttlcache.errors import ConfigError, TransferError
from ttlcache.transfer.base import Ticket
from ttlcache_connector.blocks import unpinned_turns
from ttlcache_connector.tiers.cpu import budget, demotions, worker
from ttlcache_connector.tiers.cpu import tier as cpu_tier
from ttlcache_connector.tiers.cpu.messages import CopyReport
from ttlcache_sim.harness import EngineSpec, build_vllm_config


@pytest.fixture
def make_worker() -> Iterator[Any]:
    made: list[Worker] = []

    def make(num_blocks: int = 64, cpu_blocks: int = 100, **options: Any) -> Worker:
        cpu_gb = (cpu_blocks + 1) * CHUNK_BYTES / 1e9
        soon = {"policy_options": {"ttl_s": 0.05}, "lower_tier": "cpu"}
        config = extra(**{**soon, "cpu_gb": cpu_gb, **options})
        made.append(Worker(EngineSpec(num_blocks=num_blocks, extra_config=config)))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.fixture
def below(make_worker) -> Any:
    """An engine with an ended turn of "a" below, an empty GPU; that turn's tokens."""

    def make(**options: Any) -> tuple[Worker, list[int]]:
        engine = make_worker(**options)
        context = down(engine, "a", 1)
        empty_gpu(engine)
        return engine, context

    return make


@pytest.fixture
def impatient(monkeypatch) -> None:
    monkeypatch.setattr(demotions, "COPY_TIMEOUT_S", 0.3)


def down(engine: Worker, name: str, seed: int) -> list[int]:
    """A turn that ends, expires and goes down; its context."""
    context = engine.turn(f"{name}-0", prompt(seed, 200), hints=hints(name))
    expire(engine)
    return context


def expire(engine: Worker) -> None:
    time.sleep(0.06)
    engine.settle()


def queue(engine: Worker, name: str) -> Any:
    return getattr(engine.worker.worker_role.tier, f"_{name}")


def lower(engine: Worker) -> Any:
    return engine.connector.scheduler_role.parts.lower


def free(engine: Worker) -> int:
    return engine.pool.get_num_free_blocks()


def promoted(engine: Worker) -> int:
    return engine.moved.get("tier_bytes:promoted", 0) // CHUNK_BYTES


def returns(
    engine: Worker,
    name: str,
    context: list[int],
    *,
    turn: int = 1,
    last: bool = True,
    **request_args: Any,
) -> int:
    """The next turn of a program; the blocks that came up for it."""
    before = promoted(engine)
    said = {"hints": hints(name, last=last), **request_args}
    engine.turn(f"{name}-{turn}", [*context, 5], **said)
    return promoted(engine) - before


def test_a_turn_goes_down_and_comes_back_until_its_program_ends(below):
    engine, context = below()
    index, role = lower(engine).tier.index, engine.connector.scheduler_role
    assert engine.moved["tier_bytes:demoted"] == 12 * CHUNK_BYTES
    assert returns(engine, "a", context, last=False) == 12
    engine.settle()
    assert role.parts.controller.telemetry.metrics.totals["reloads", "cpu"] == 1
    # Of the next turn only what is new goes down.
    assert engine.moved["tier_bytes:demoted"] == 13 * CHUNK_BYTES
    assert index.used_blocks == 13
    # Half a hit in GPU memory, half below.
    empty_gpu(engine)
    engine.turn("b", context[:100], hints=hints("b", last=True))
    assert promoted(engine) == 12 + 6
    assert returns(engine, "a", context, turn=2) == 6
    engine.settle()
    assert index.used_blocks == 0


def test_the_turn_whose_time_was_over_first_leaves_first(make_worker):
    engine = make_worker(cpu_blocks=24)
    contexts = {name: down(engine, name, seed) for seed, name in enumerate("abc")}
    empty_gpu(engine)
    for name, found in (("c", 12), ("b", 12), ("a", 0)):
        assert returns(engine, name, contexts[name], max_tokens=1) == found, name


def test_a_turn_larger_than_the_budget_keeps_its_beginning(below):
    engine, context = below(cpu_blocks=5)
    assert returns(engine, "a", context) == 5


def test_a_turn_larger_than_the_budget_costs_no_other_turn(make_worker):
    engine = make_worker(cpu_blocks=14)
    context = down(engine, "a", 1)
    engine.turn("b-0", prompt(2, 600), hints=hints("b"))
    expire(engine)
    empty_gpu(engine)
    assert returns(engine, "a", context) == 12


def test_a_program_that_ends_after_its_pin_gives_host_memory_up(below):
    engine, _ = below()
    assert lower(engine).tier.index.used_blocks == 12
    engine.connector.scheduler_role.parts.controller.end_program("", "a")
    assert lower(engine).tier.index.used_blocks == 0


@pytest.mark.parametrize("reset_connector", [False, True])
def test_new_weights_make_what_lies_below_worthless(below, reset_connector):
    """Training loops ask for a plain reset, as without us."""
    engine, context = below()
    assert engine.scheduler.reset_prefix_cache(reset_connector=reset_connector)
    assert returns(engine, "a", context, last=False) == 0
    expire(engine)
    empty_gpu(engine)
    assert returns(engine, "a", context, turn=2) == 12


def test_an_aborted_request_leaves_nothing_locked(below):
    engine, context = below()
    for step in range(3):
        engine.add(f"b-{step}", [*context, 5], hints=hints("b"))
        for _ in range(step):
            engine.step()
        engine.abort(f"b-{step}")
    engine.run()
    engine.settle()
    assert free(engine) == 63
    lower(engine).tier.index.clear()
    assert lower(engine).tier.index.used_blocks == 0


@pytest.mark.parametrize("fault", ["engine", "plan"])
def test_a_copy_that_fails_is_a_prefill(below, monkeypatch, fault):
    engine, context = below()
    if fault == "engine":
        queue(engine, "loads").engine.close()
    else:
        monkeypatch.setattr(worker, "plan_copies", refuse)
    assert returns(engine, "a", context) == 0
    engine.settle()
    assert free(engine) == 63


@pytest.mark.parametrize("direction", ["stores", "loads"])
def test_an_engine_that_is_broken_for_good_is_the_end_of_the_tier(below, direction):
    engine, context = below()
    queue(engine, direction).engine._break("out of events")
    returns(engine, "a", context, last=False)  # whatever it found
    time.sleep(0.06)
    step_until(engine, lambda: not lower(engine).is_up())
    before = engine.moved["tier_bytes:demoted"]
    context = down(engine, "b", 2)
    empty_gpu(engine)
    assert returns(engine, "b", context) == 0
    assert engine.moved["tier_bytes:demoted"] == before
    assert free(engine) == 63


def refuse(*_: Any, **__: Any) -> None:
    raise TransferError("no such block")


class BrokenEngine:
    """Stands before a queue's engine.

    Attributes:
        hangs: copies begin only with `mend`.
        raises: name of the method that raises.
    """

    def __init__(self, queue: Any, *, hangs: bool = False, raises: str = "") -> None:
        self.inner, self.hangs, self.raises = queue.engine, hangs, raises
        self.name, self.waiting = self.inner.name, []
        self._tickets, self._begun = itertools.count(1000), itertools.count(1000)
        queue.engine = self

    def mend(self) -> None:
        self.hangs, self.raises = False, ""

    def submit(self, plan: Any, after: int = 0) -> Ticket:
        self._maybe_raise("submit")
        self.waiting.append(plan)
        return Ticket(next(self._tickets))

    def poll(self) -> list[Any]:
        self._maybe_raise("poll")
        while self.waiting and not self.hangs:
            self.inner.submit(self.waiting.pop(0))
        ended = self.inner.poll()  # in the order of submission
        return [replace(each, ticket=next(self._begun)) for each in ended]

    def _maybe_raise(self, method: str) -> None:
        if method == self.raises:
            raise RuntimeError(method)


@pytest.mark.parametrize("is_alone", [False, True])
def test_a_load_that_hangs_costs_its_request_a_prefill(
    make_worker, impatient, is_alone
):
    """The device may write to its blocks until it ends: nobody else gets them."""
    engine = make_worker()
    context, other = down(engine, "a", 1), down(engine, "b", 2)
    empty_gpu(engine)
    broken = BrokenEngine(queue(engine, "loads"), hangs=True)
    if not is_alone:
        beside = engine.add("c-0", prompt(3, 40), max_tokens=400, hints=hints("c"))
    engine.turn_beside("a-1", [*context, 5], hints=hints("a", last=True))
    if not is_alone:
        assert beside.num_output_tokens > 0
        engine.abort("c-0")
    assert not lower(engine).is_up()
    assert free(engine) == 63 - 12
    use_free_memory(engine)
    # Nothing more is ordered of it, in either direction, and an idle engine may rest.
    engine.turn("b-1", [*other, 5], hints=hints("b"))
    time.sleep(0.06)
    engine.step()
    assert promoted(engine) == 0
    assert len(broken.waiting) == 1
    assert not engine.scheduler.has_requests()
    engine.kv.fill_(-1)
    broken.mend()
    step_until(engine, lambda: lower(engine).is_up())
    assert free(engine) == 63
    empty_gpu(engine)
    returns(engine, "b", other, turn=2)
    assert promoted(engine) == 12 + 12  # the one that nobody waited for


def test_a_store_that_hangs_holds_no_gpu_memory(make_worker, impatient):
    engine = make_worker()
    broken = BrokenEngine(queue(engine, "stores"), hangs=True)
    context = engine.turn("a-0", prompt(1, 200), hints=hints("a"))
    time.sleep(0.06)
    step_until(engine, lambda: not lower(engine).is_up())
    engine.step()
    assert free(engine) == 63
    assert lower(engine).tier.index.used_blocks == 12
    use_free_memory(engine)
    broken.mend()
    engine.turn("b-0", prompt(2, 200), hints=hints("b", last=True))
    step_until(engine, lambda: lower(engine).is_up())
    assert lower(engine).tier.index.used_blocks == 0
    assert returns(engine, "a", context) == 0


@pytest.mark.parametrize("method", ["submit", "poll"])
@pytest.mark.parametrize("direction", ["stores", "loads"])
def test_an_engine_that_raises_costs_a_prefill(below, impatient, direction, method):
    engine, context = below()
    broken = BrokenEngine(queue(engine, direction), raises=method)
    engine.turn_beside("a-1", [*context, 5], hints=hints("a"))
    assert promoted(engine) == (12 if direction == "stores" else 0)
    time.sleep(0.06)
    for _ in range(3):
        engine.step()
    broken.mend()
    step_until(engine, lambda: lower(engine).is_up())
    engine.settle()
    assert free(engine) == 63
    context = down(engine, "b", 2)
    empty_gpu(engine)
    assert returns(engine, "b", context) == 12


@pytest.mark.parametrize("is_late", [False, True])
def test_a_load_that_could_not_be_ordered_is_tried_again(below, is_late):
    engine, context = below()
    tier, original = lower(engine).tier, lower(engine).tier.build_metadata

    def fail(output: Any) -> None:
        if is_late:
            original(output)
        tier.build_metadata = original
        raise RuntimeError("once")

    tier.build_metadata, engine.on_step = fail, None
    assert returns(engine, "a", context) == 12
    assert lower(engine).faults.total == 1
    assert free(engine) == 63
    assert tier.fill().used_bytes == 0


def test_a_hit_with_fewer_blocks_than_vllm_allocates_is_prefilled(below):
    """vLLM counts the blocks of a hit and of a request by different rules at times:
    windows of drafts, chunked attention that begins within a chunk."""
    engine, context = below()
    tier, find = lower(engine).tier, lower(engine).tier.index.find

    def too_few(*args: Any) -> Any:
        found = find(*args)
        if found is not None:
            (blocks,) = found.blocks
            blocks[3] = tier.index._pool.null_block
        return found

    tier.index.find, engine.on_step = too_few, None
    assert returns(engine, "a", context, last=False) == 0  # and no wrong byte
    assert lower(engine).faults.total == 1
    role = engine.connector.scheduler_role
    assert role.parts.controller.telemetry.metrics.totals["failed_reloads", ""] == 1
    tier.index.find = find
    expire(engine)
    empty_gpu(engine)
    assert returns(engine, "a", context, turn=2) == 12
    assert free(engine) == 63


def test_an_engine_that_schedules_ahead_is_reset_while_it_runs(make_engine):
    """vLLM would free the blocks of requests when the step under way has ended."""
    config = extra(lower_tier="cpu", cpu_gb=0.01)
    engine = make_engine(num_blocks=64, async_scheduling=True, extra_config=config)
    request = engine.add("a-0", prompt(1, 200), max_tokens=50)
    for _ in range(4):
        engine.step()
    assert request.num_in_flight_tokens
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.run()
    assert request.num_output_tokens == 50


def test_what_a_step_computes_is_unwritten_until_then(make_worker):
    """vLLM sets a block's hash as it allocates it: the bytes are another's still."""
    engine = make_worker(policy_options={"ttl_s": 30.0})
    tier, found = lower(engine).tier, []
    build = tier.build_metadata

    def note(output: Any) -> Any:
        found.append(tier._unwritten(output))
        return build(output)

    tier.build_metadata = note
    context = engine.turn("a-0", prompt(1, 200), hints=hints("a"))
    turn = set(range(1, 64)) & found[0]
    assert len(turn) == len(found[0]) == 13  # 200 tokens of 16 a block
    (pending,) = tier.demotions._turns
    assert tier.demotions.demote(pending)
    assert tier.demotions.order(turn, is_up=True) == {}
    found.clear()
    engine.turn("a-1", [*context, *prompt(2, 40)], hints=hints("a", last=True))
    assert found[0]
    assert not found[0] & turn - {max(turn)}  # the blocks that were hit are not
    found.clear()
    engine.add("b-0", prompt(3, 8), max_tokens=20)
    for _ in range(12):
        engine.step()
    (own,) = engine.scheduler.kv_cache_manager.get_block_ids("b-0")
    # Its first block is filled when its 16 tokens have KV; the next one is new then.
    assert [set(own) & step for step in found[6:10]] == [
        set(),
        set(),
        {own[0]},
        set(own[1:]),
    ]


def test_a_step_that_takes_long_is_no_stall(monkeypatch):
    monkeypatch.setattr(demotions, "COPY_TIMEOUT_S", 0.01)
    copies: Any = demotions.Copies(1)
    copies.begin("a", 1)
    time.sleep(0.02)
    assert copies.take_ended(CopyReport()) == []  # of the step before the long one
    assert not copies.is_stalled
    assert copies.take_ended(CopyReport({"a": 1})) == [("a", 1, True)]
    copies.begin("b", 1)
    time.sleep(0.02)
    copies.take_ended(CopyReport())
    copies.take_ended(CopyReport())
    assert copies.is_stalled


def test_no_running_request_is_preempted_for_a_copy(make_worker):
    engine = make_worker(num_blocks=40)
    broken = BrokenEngine(queue(engine, "stores"), hangs=True)
    engine.turn("a-0", prompt(1, 200), hints=hints("a"))
    time.sleep(0.06)
    step_until(engine, lambda: bool(broken.waiting))
    last = hints("b", last=True)
    running = engine.add("b", prompt(2, 300), max_tokens=200, hints=last)
    step_until(engine, running.is_finished)  # with 32 blocks
    assert running.num_preemptions == 0
    broken.mend()
    engine.settle()
    assert (free(engine), lower(engine).tier.index.used_blocks) == (39, 0)


def test_a_head_that_waits_for_memory_is_looked_up_once(below, monkeypatch):
    engine, context = below()
    engine.add("big", prompt(3, 800), max_tokens=100, hints=hints("big", last=True))
    engine.step()
    asked, index = [], lower(engine).tier.index
    find = index.find
    monkeypatch.setattr(index, "find", lambda *args: asked.append(0) or find(*args))
    engine.add("late", [*context, 5], hints=hints("a", last=True))
    for _ in range(5):
        engine.step()
    assert len(asked) == 1
    step_until(engine, lambda: "late" in engine.finished)
    assert promoted(engine) == 12


@pytest.mark.parametrize("forgets", [False, True])
def test_a_reset_does_not_wait_for_a_store(make_worker, forgets):
    engine = make_worker()
    context = down(engine, "a", 1)
    broken = BrokenEngine(queue(engine, "stores"), hangs=True)
    other = engine.turn("b-0", prompt(2, 200), hints=hints("b"))
    time.sleep(0.06)
    step_until(engine, lambda: bool(broken.waiting))
    assert free(engine) == 63 - 12
    assert engine.scheduler.reset_prefix_cache(reset_connector=forgets)
    engine.kv.fill_(-1)  # other weights, or what other requests compute
    broken.mend()
    engine.settle()
    assert returns(engine, "a", context) == returns(engine, "b", other) == 0


def test_a_load_of_an_aborted_request_holds_its_blocks_to_its_end(below):
    """vLLM itself resets nothing then: the device may still write to them."""
    engine, context = below()
    broken = BrokenEngine(queue(engine, "loads"), hangs=True)
    engine.add("a-1", [*context, 5], hints=hints("a"))
    step_until(engine, lambda: bool(broken.waiting))
    engine.abort("a-1")
    assert not engine.scheduler.reset_prefix_cache()
    broken.mend()
    engine.settle()
    assert engine.scheduler.reset_prefix_cache()


def test_a_load_that_never_ends_keeps_no_other_waiting(below, monkeypatch):
    """Its blocks are not free soon: what the tier may not store gives way."""
    monkeypatch.setattr(demotions, "COPY_TIMEOUT_S", 0.01)
    engine, context = below()
    broken = BrokenEngine(queue(engine, "loads"), hangs=True)
    engine.add("a-1", [*context, 5], hints=hints("a") | {"ttl": 60})
    step_until(engine, lambda: bool(broken.waiting))
    time.sleep(0.02)
    step_until(engine, lambda: "a-1" in engine.finished)
    assert free(engine) == 63 - 12 - 13  # those of the load, and its turn again
    engine.turn("b-0", prompt(3, 45 * 16), hints=hints("b", last=True))
    broken.mend()


def test_salts_and_adapters_are_told_apart(make_worker):
    engine = make_worker()
    adapter = LoRARequest("one", 1, "/none")
    for number, args in enumerate(({"cache_salt": "s"}, {"lora_request": adapter})):
        name = f"a{number}"
        context = engine.turn(name, prompt(1, 200), hints=hints(name), **args)
        expire(engine)
        empty_gpu(engine)
        assert returns(engine, f"b{number}", context) == 0, args
        assert returns(engine, f"c{number}", context, **args) == 12, args


def test_the_budget_is_never_exceeded(make_worker):
    engine = make_worker(cpu_blocks=10)
    host = engine.worker.worker_role.tier._host
    assert host.shape == (11, CHUNK_BYTES)  # one stands for no block
    for seed in range(5):
        down(engine, f"p{seed}", seed)
        fill = lower(engine).tier.fill()
        assert 0 < fill.used_bytes <= fill.budget_bytes == 10 * CHUNK_BYTES
    with pytest.raises(ConfigError, match=r"cpu_gb.*expected: at least"):
        make_worker(cpu_blocks=0)


def test_memory_is_resident_at_the_start(make_worker):
    gc.collect()  # what is freed meanwhile would not be seen
    before = psutil.Process().memory_info().rss
    make_worker(cpu_blocks=20_000)
    grown = psutil.Process().memory_info().rss - before
    assert grown > 0.9 * 20_000 * CHUNK_BYTES


@pytest.mark.parametrize(
    ("line", "folder", "names"),
    [
        ("0::/job/step", "", ("memory.max", "anon", "shmem")),
        (
            "4:memory:/x",
            "memory",
            ("memory.limit_in_bytes", "total_rss", "total_shmem"),
        ),
    ],
)
@pytest.mark.parametrize("has_own", [True, False])
def test_what_a_jobs_control_groups_leave_is_available(
    monkeypatch, tmp_path, line, folder, names, has_own
):
    """One of the process's groups has the limit: its own, or one around it."""
    limit, *used = names
    group = tmp_path / folder / (line.rpartition(":")[2][1:] if has_own else "")
    group.mkdir(parents=True, exist_ok=True)
    (tmp_path / "self").write_text(f"1:name=systemd:/\n{line}\n")
    monkeypatch.setattr(budget, "CGROUP", tmp_path)
    monkeypatch.setattr(budget, "PROCESS", tmp_path / "self")
    stat = f"{used[0]} 3000000\nfile 9\n{used[1]} 1000000\n"
    (group / "memory.stat").write_text(stat)
    (group / limit).write_text("max\n")
    assert budget.available_bytes() > 4_000_000
    (group / limit).write_text("4000100\n")
    assert budget.available_bytes() == 100


@pytest.mark.parametrize("fails", ["allocate", "whole_blocks", "make_engines"])
def test_without_memory_to_copy_to_every_turn_is_prefilled(
    make_worker, monkeypatch, caplog, fails
):
    def fail(*_: object) -> None:
        raise (OSError if fails == "allocate" else TransferError)("none of it")

    monkeypatch.setattr(worker, fails, fail)
    monkeypatch.setattr(worker, "log", logging.getLogger("tests.cpu_tier"))
    engine = make_worker()
    role = engine.connector.scheduler_role
    context = down(engine, "a", 1)
    assert not role.parts.lower.is_up()  # said with the first step: none is tried
    assert role.parts.controller.telemetry.metrics.totals["tier_outages", ""] == 1
    empty_gpu(engine)
    assert returns(engine, "a", context) == 0
    (told,) = (text for text in caplog.messages if "no CPU tier" in text)
    assert told.endswith("none of it")
    assert ("demotions", "failed") not in role.parts.controller.telemetry.metrics.totals
    assert not engine.moved


def test_a_worker_without_caches_shuts_down():
    worker.CPUWorkerTier(SimpleNamespace(), 1).shutdown()


#: A GPU that has all that "auto" asks for.
ENGINE = {
    "kv_transfer_config": ("TTLConnector", "kv_both"),
    "runner_type": "generate",
    "has_inner_state": False,
    "world_size": 1,
    "data_parallel_size": 1,
    "data_parallel_size_local": 1,
    "data_parallel_external_lb": False,
    "distributed_executor_backend": "mp",
    "nnodes": 1,
    "pipeline_parallel_size": 1,
    "free_gb": 200.0,
}


@pytest.mark.parametrize(
    ("differs", "settings", "tier", "cpu_gb"),
    [
        ({}, {}, "cpu", 16.0),
        ({}, {"cpu_gb": 90.0}, "cpu", 90.0),
        ({}, {"cpu_gb": 201.0}, "none", None),
        ({"data_parallel_size_local": 8}, {"cpu_gb": 26.0}, "none", None),
        ({"nnodes": 2}, {"cpu_gb": 390.0}, "cpu", 390.0),
        ({}, {"lower_tier": "none"}, "none", None),
        ({}, {"policy": "observe"}, "none", None),
        ({"world_size": 2}, {}, "cpu", 32.0),
        ({"data_parallel_size_local": 8}, {}, "cpu", 6.25),
        ({"free_gb": 3.9}, {}, "none", None),
        ({"free_gb": 3.9}, {"lower_tier": "cpu"}, "cpu", 3.9 / 4),
        ({"runner_type": "pooling"}, {}, "none", None),
        ({"has_inner_state": True}, {}, "none", None),
        ({"data_parallel_size": 8, "data_parallel_external_lb": True}, {}, "cpu", 6.25),
        ({"nnodes": 2}, {}, "none", None),
        ({"distributed_executor_backend": "ray"}, {}, "none", None),
        ({"pipeline_parallel_size": 2}, {}, "none", None),
        ({"kv_transfer_config": ("MultiConnector", "kv_both")}, {}, "none", None),
        ({"kv_transfer_config": ("TTLConnector", "kv_producer")}, {}, "none", None),
        ({"gpu": False}, {}, "none", None),
        ({"gpu": False}, {"cpu_gb": 9.0}, "cpu", 9.0),
        ({"gpu": False}, {"cpu_gb": 9.0, "policy": "observe"}, "none", None),
        ({"cupy": False}, {}, "none", None),
        ({}, {"policy": "none"}, "none", None),
        ({}, {"policy": "none", "cpu_gb": 9.0}, "cpu", 9.0),
    ],
)
def test_auto_is_the_cpu_tier_where_nothing_is_against_it(
    monkeypatch, differs, settings, tier, cpu_gb
):
    has = {"gpu": True, "cupy": True, **ENGINE, **differs}
    name, role = has["kv_transfer_config"]
    vllm_config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector=name, kv_role=role),
        parallel_config=SimpleNamespace(**has),
        model_config=SimpleNamespace(**has),
    )
    found = object() if has["cupy"] else None
    monkeypatch.setattr(cpu_tier, "find_spec", lambda _: found)
    monkeypatch.setattr(current_platform, "is_cuda", lambda: has["gpu"])
    monkeypatch.setattr(budget, "available_bytes", lambda: has["free_gb"] * 1e9)
    in_force = cpu_tier.resolve_auto(vllm_config, load_config(settings))
    assert in_force.pop("cpu_gb", None) == (cpu_gb and pytest.approx(cpu_gb))
    assert in_force == {"lower_tier": tier}


@pytest.mark.parametrize(("meant", "tier"), [(True, "cpu"), (False, "none")])
def test_every_process_of_a_server_is_told_what_auto_is(monkeypatch, meant, tier):
    """In vLLM's own configuration, which is sent to them."""
    monkeypatch.setattr(cpu_tier, "tier_on_this_machine", lambda _: "cpu")
    monkeypatch.setattr(cpu_tier, "_is_default_with", lambda _: meant)
    transfer = build_vllm_config(EngineSpec()).kv_transfer_config
    told = load_config(transfer.kv_connector_extra_config)
    assert (told.lower_tier, told.cpu_gb is not None) == (tier, meant)
    assert transfer.kv_load_failure_policy == ("recompute" if meant else "fail")


def test_a_copy_is_good_only_if_all_ranks_made_it():
    copies = demotions.Copies(2)
    for number in (1, 2):
        copies.begin(number, "copy")
    one = CopyReport({1: 1, 2: 1}, set(), {}, can_copy=True)
    both = one.aggregate(CopyReport({2: 1}, {2}, {}, can_copy=False))
    assert not both.can_copy
    assert copies.take_ended(both) == [(2, "copy", False)]
    assert copies.take_ended(CopyReport({1: 1}, {1})) == [(1, "copy", False)]


@pytest.mark.parametrize("option", budget.MUST_BE_ONE)
def test_a_cache_that_ranks_cut_is_refused(option):
    parallel = SimpleNamespace(parallel_config=SimpleNamespace(**{option: 2}))
    with pytest.raises(ConfigError, match=option):
        budget.count_blocks(load_config({}), parallel, None)


@pytest.mark.parametrize("mode", ["on-expiry", "on-pressure", "write-through"])
def test_random_agents_on_a_small_pool(make_worker, monkeypatch, mode):
    """Expiry, claims, victims, preemptions, aborts, a full tier: no wrong byte."""
    monkeypatch.setattr(unpinned_turns, "COPY_WAIT_S", 0.05)
    engine = make_worker(
        num_blocks=40, cpu_blocks=50, demote=mode, max_pinned_fraction=0.5
    )
    play_random_agents(
        engine, mode, is_enough=lambda number: number >= 60 and promoted(engine) > 50
    )
    assert free(engine) == 39


def test_turns_that_end_alike_are_stored_as_one(make_worker):
    engine = make_worker(num_blocks=200)
    index = lower(engine).tier.index
    for name in "abc":
        down(engine, name, 1)
        empty_gpu(engine)
    assert (len(index._turns), index.used_blocks) == (1, 12)
    (turn,) = index._turns.values()
    assert turn.program is None, "the end of one program would drop it for the others"
    index.clear()
    assert index.used_blocks == 0


@pytest.mark.parametrize("fails", [False, True])
def test_what_turns_have_in_common_is_copied_once(make_worker, monkeypatch, fails):
    """All of them are ordered before the first copy has ended."""
    engine = make_worker(num_blocks=200, cpu_blocks=100)
    begin, copied, first = demotions.CPUDemotions._begin, [], []

    def noted(self, request_id, *args):
        store = begin(self, request_id, *args)
        copied.append(len(store.missing))
        if len(copied) == 1:
            first.append(store)
        return store

    monkeypatch.setattr(demotions.CPUDemotions, "_begin", noted)
    for name in "abcd":
        tail = prompt(ord(name), 32) if name != "d" else []
        engine.add(f"{name}-0", prompt(1, 160) + tail, max_tokens=1, hints=hints(name))
        engine.step()
    engine.run()
    if fails:  # after all were ordered, as where their memory is needed
        end = demotions.CPUDemotions._end

        def fail(self, store, *, is_ok):
            end(self, store, is_ok=is_ok and store is not first[0])

        monkeypatch.setattr(demotions.CPUDemotions, "_end", fail)
    expire(engine)
    index = lower(engine).tier.index
    assert copied[:5] == [12, 2, 2, 1, *([9] if fails else ())], (
        "what failed, by another"
    )
    assert len(index._turns) == (3 if fails else 4)
    assert index.used_blocks == 10 + (4 if fails else 6)
    index.clear()
    assert index.used_blocks == 0


def test_what_one_request_loads_others_wait_for_and_share(below, monkeypatch):
    engine, context = below(num_blocks=200)
    index, lookups = lower(engine).tier.index, []
    find = index.find
    monkeypatch.setattr(index, "find", lambda *a: lookups.append(a) or find(*a))
    for name in "bcde":
        engine.add(f"{name}-0", [*context, 5], max_tokens=2, hints=hints(name))
    engine.step()
    is_loaded = engine.connector.scheduler_role.requests.is_loaded_by_another
    assert not is_loaded(SimpleNamespace(block_hashes=[]), 1000), "it lacks no block"
    engine.run()
    assert promoted(engine) == 12
    found = [hashes for hashes, *_ in lookups if hashes]
    assert len(found) == 1, "those that wait do not look it up in every step"
    assert len(engine.finished) >= 4
