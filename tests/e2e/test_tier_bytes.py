"""Every byte of the KV, through vLLM's scheduler, our halves and a real LMCache server.

No model: the "forward pass" writes a fixed function of token and position into a real
KV tensor, and before every step each byte that vLLM believes to be computed is compared
with it. A block that was overwritten, mixed up, or read too early cannot hide.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.outputs import KVConnectorOutput

from bench.tier_server import TierServer
from ttlcache.errors import TransferError
from ttlcache.events import Urgency
from ttlcache.types import GapKey
from ttlcache_connector import kv_mover
from ttlcache_connector.connector import TTLConnector
from ttlcache_connector.harness import (
    EngineHarness,
    EngineSpec,
    build_kv_cache_config,
)
from ttlcache_connector.invariants import violations
from ttlcache_connector.lower_lmcache import registration, transfer
from ttlcache_connector.serve_tiers import TierOptions

pytestmark = pytest.mark.e2e

BLOCK = 16
HEADS, CONTENT = 2, 64
CHUNK_BYTES = HEADS * CONTENT * BLOCK * 2
WAIT_S = 60.0


class Worker(EngineHarness):
    """The harness with a worker: a KV tensor, and our connector's worker role."""

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec)
        self.kv = torch.zeros(spec.num_blocks, HEADS, BLOCK, CONTENT, dtype=torch.int16)
        view = self.kv.view(torch.bfloat16)
        # The engine core would have resolved it: the CPU backend's.
        self.config.cache_config.kv_cache_layout = "LBHNC"
        self.worker = TTLConnector(
            self.config, KVConnectorRole.WORKER, build_kv_cache_config(spec)
        )
        self.worker.register_kv_caches({"layer.0": view})
        # As vLLM's engine core does it before the first step.
        if told := self.worker.get_handshake_metadata():
            self.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): told})
        self.on_step = self.check
        self.moved: dict[str, int] = {}
        self.closed = False

    def execute(self, output: Any) -> KVConnectorOutput:
        """As vLLM's model runner does it."""
        self.verify(output)
        metadata = output.kv_connector_metadata
        self.worker.handle_preemptions(metadata)
        self.worker.bind_connector_metadata(metadata)
        self._forward(output)
        self.worker.start_load_kv(None)
        self.worker.wait_for_save()
        done = self.worker.get_transfer_results(output.finished_req_ids)
        report = KVConnectorOutput(
            finished_sending=done.finished_sending or None,
            finished_recving=done.finished_recving or None,
            invalid_block_ids=self.worker.get_block_ids_with_load_errors(),
            kv_connector_worker_meta=self.worker.build_connector_worker_meta(),
        )
        report.failed_recving = done.failed_recving
        stats = self.worker.get_kv_connector_stats()
        for name, label, by in stats.data["counters"] if stats else ():
            key = f"{name}:{label}"
            self.moved[key] = self.moved.get(key, 0) + by
        self.worker.clear_connector_metadata()
        return report

    def verify(self, output: Any) -> None:
        """What vLLM counts as computed is there, to the last byte."""
        for request_id, new in output.num_scheduled_tokens.items():
            request = self.scheduler.requests.get(request_id)
            if request is None:
                continue
            computed = request.num_computed_tokens - new
            tokens = request.all_token_ids[:computed]
            found = self._rows(request_id)[:computed]
            assert torch.equal(found, _content(tokens)), f"{request_id} is corrupt"

    def check(self) -> None:
        side = self.connector.side
        assert violations(self.scheduler, side.controller, side.ledger) == []
        assert side.faults.total == side.lower.faults.total == 0
        assert self.worker.worker.faults.total == 0

    def settle(self) -> None:
        """Step until pins and copies have come to an end."""
        deadline = time.monotonic() + WAIT_S
        side = self.connector.side
        while time.monotonic() < deadline:
            self.step()
            busy = side.lower.has_work() or side.ledger.references()
            if not busy and not len(side.controller.pins):
                return
            time.sleep(0.005)
        raise AssertionError("copies do not end")

    def turn_beside(self, request_id: str, tokens: list[int], **kwargs: Any) -> Any:
        """A turn, while others run; its context."""
        request = self.add(request_id, tokens, **kwargs)
        step_until(self, request.is_finished)
        return list(request.all_token_ids)

    def close(self) -> None:
        """Once; LMCache's adapters would wait for a server that is gone."""
        if not self.closed:
            self.closed = True
            self.connector.shutdown()
            self.worker.shutdown()

    def _forward(self, output: Any) -> None:
        for request_id, new in output.num_scheduled_tokens.items():
            request = self.scheduler.requests.get(request_id)
            if request is None:
                continue
            end = request.num_computed_tokens
            (blocks,) = self.scheduler.kv_cache_manager.get_block_ids(request_id)
            rows = _content(request.all_token_ids[:end])[end - new :]
            positions = torch.arange(end - new, end - new + len(rows))
            pages = torch.tensor(blocks)[positions // BLOCK]
            self.kv[pages, :, positions % BLOCK] = rows

    def _rows(self, request_id: str) -> torch.Tensor:
        (blocks,) = self.scheduler.kv_cache_manager.get_block_ids(request_id)
        # [blocks, heads, slots, content] to one row a token.
        pages = self.kv[torch.tensor(blocks)].permute(0, 2, 1, 3)
        return pages.reshape(-1, HEADS, CONTENT)


def _content(tokens: Any) -> torch.Tensor:
    """[tokens, heads, content]: a function of all tokens up to each position."""
    mixed = torch.tensor(list(tokens), dtype=torch.int64)
    mixed = torch.cumsum(mixed * 40_503 + 12_345, 0)
    cells = torch.arange(HEADS * CONTENT) * 7919 + 1
    rows = (mixed[:, None] * cells[None, :]) >> 3
    return (rows % 30_000).to(torch.int16).reshape(-1, HEADS, CONTENT)


@pytest.fixture(scope="module")
def tiers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TierServer]:
    folder = tmp_path_factory.mktemp("bytes")
    options = TierOptions(
        cpu_gb=0.1, disk=folder / "disk", disk_gb=1.0, chunk_tokens=BLOCK
    )
    with TierServer(options, folder / "lmcache.log") as server:
        yield server


@pytest.fixture(scope="module")
def two_block_tiers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TierServer]:
    """One in which a pin may end within a chunk."""
    options = TierOptions(cpu_gb=0.1, chunk_tokens=2 * BLOCK)
    log = tmp_path_factory.mktemp("bytes2") / "lmcache.log"
    with TierServer(options, log) as server:
        yield server


@pytest.fixture
def make_worker(tiers: TierServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    made: list[Worker] = []
    # Several portions a request.
    monkeypatch.setattr(transfer, "MAX_PART_BYTES", 5 * CHUNK_BYTES)

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
            "linger": False,  # nobody needs the memory in most of these tests
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


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, 30_000) for _ in range(length)]


def empty_gpu(engine: Worker) -> None:
    assert engine.scheduler.reset_prefix_cache()
    engine.kv.fill_(-1)


def step_until(engine: Worker, reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not reached():
        assert time.monotonic() < deadline
        engine.step()
        time.sleep(0.005)


def hints(name: str, *, last: bool = False) -> dict[str, Any]:
    return {"program_id": name, "tool": "bash", "is_last_step": last}


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
    totals = engine.connector.side.controller.metrics.totals
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
    adapter = engine.connector.side.lower.tier._adapter
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
    assert "tier_mover_bytes:lmcache" not in moved


def test_lmcaches_mover_serves_what_ours_refuses(make_worker, monkeypatch, caplog):
    """It stores another order of bytes, so neither side reads what ours wrote."""
    ours = make_worker()
    round_trip(ours, 151)

    def refuse(*args: Any) -> None:
        raise TransferError("a layout that nobody has seen")

    monkeypatch.setattr(kv_mover, "read_layout", refuse)
    with heard(caplog):
        theirs = make_worker()
    assert "own mover, in this worker (a layout that nobody" in caplog.text
    round_trip(theirs, 151)  # nothing was found of the same context
    moved = theirs.moved
    assert moved["tier_mover_bytes:lmcache"] == 2 * 12 * CHUNK_BYTES
    assert "tier_mover_bytes:reference" not in moved


@contextlib.contextmanager
def heard(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """vLLM's loggers do not hand on what they are told."""
    registration.log.addHandler(caplog.handler)
    yield
    registration.log.removeHandler(caplog.handler)


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


def test_a_context_is_back_in_cpu_memory_before_its_program(make_worker, tiers):
    engine = make_worker(promote_ahead=True)
    side = engine.connector.side
    for _ in range(20):
        side.controller.gaps.observe(GapKey("bash"), 1000.0)
    context = engine.turn("a", prompt(50, 200), hints=hints("ahead"))
    time.sleep(0.25)
    engine.settle()
    empty_gpu(engine)
    assert tiers.clear_cpu()
    (turn,) = side._promoter._waiting
    assert turn.due_s > side._clock.now_s() + 900
    turn.due_s = side._clock.now_s()  # its time has come
    engine.settle()
    assert not side._promoter._waiting
    deadline = time.monotonic() + WAIT_S
    while tiers.cpu_chunks() < 12:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    engine.turn("b", [*context, 5], hints=hints("ahead", last=True))
    engine.settle()
    totals = side.controller.metrics.totals
    assert (totals["reloads", "cpu"], totals["reloads", "disk"]) == (1, 0)


def test_an_aborted_request_leaves_nothing_locked(make_worker, tiers):
    """LMCache clears only what nobody has reserved for reading."""
    engine = make_worker()
    context = engine.turn("a", prompt(70, 200), hints=hints("locks"))
    time.sleep(0.25)
    engine.settle()
    empty_gpu(engine)
    half = engine.connector.side.lower.tier
    request = engine.add("b", [*context, 5], hints=hints("locks"))
    deadline = time.monotonic() + WAIT_S
    while half._adapter.check_lookup_result("b") is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    engine.abort("b")
    engine.run()
    assert request.is_finished()
    assert tiers.clear_cpu()
    for file in tiers.options.disk.glob("*.data"):
        file.unlink()
    promoted = engine.moved.get("tier_bytes:promoted", 0)
    engine.turn("c", [*context, 5], hints=hints("locks", last=True))
    assert engine.moved.get("tier_bytes:promoted", 0) == promoted


def test_what_went_down_while_its_next_turn_waited_is_found(make_worker, tiers):
    """That turn had asked what is below when it came, and was told: the first half."""
    engine = make_worker(num_blocks=64, ttl_s=60.0)
    side = engine.connector.side
    # Its pin is whole when it comes: it would not ask.
    side.stored_tokens = lambda request: math.inf
    lookup = side.lower.tier._adapter.check_lookup_result

    def give_way(copies: int) -> None:
        with side.ledger.copying_first():
            assert side.controller.reclaim(12, Urgency.RUNNING, "runs") > 0
        totals = side.controller.metrics.totals
        step_until(engine, lambda: totals["demotions", "stored"] == copies)

    engine.add("runs", prompt(80, 40 * BLOCK), max_tokens=400, hints=hints("old"))
    engine.step()
    context = engine.turn_beside("a", prompt(81, 100), hints=hints("found"))
    give_way(1)
    half = len(context) // BLOCK * BLOCK
    grown = [*context, *prompt(84, 100)]
    context = engine.turn_beside("a2", grown, hints=hints("found"))
    # 13 blocks beside its pin, where 10 are free.
    engine.add("b", [*context, *prompt(82, 200)], hints=hints("found", last=True))
    step_until(engine, lambda: lookup("b") == half)
    for _ in range(3):
        engine.step()
    before = engine.moved.get("tier_bytes:promoted", 0)
    give_way(2)
    # Somebody else's use of the memory, and then there is room for both.
    engine.turn_beside("filler", prompt(83, 20 * BLOCK), hints=hints("old"))
    engine.abort("runs")
    engine.run()
    assert engine.finished["b"].num_output_tokens
    assert engine.moved["tier_bytes:promoted"] - before >= 10 * CHUNK_BYTES
    side.release_all()
    engine.settle()
    assert tiers.clear_cpu()  # what either lookup found is not locked


def use_free_memory(engine: Worker) -> None:
    """As if others had computed something in all that is free now."""
    blocks = engine.pool.get_new_blocks(engine.pool.get_num_free_blocks())
    for block in blocks:
        engine.kv[block.block_id].fill_(-1)
    engine.pool.free_blocks(blocks)


def reclaim(engine: Worker, blocks: int) -> None:
    """As for a waiting request; returns when what gave way is below."""
    side = engine.connector.side
    totals = side.controller.metrics.totals
    copies = totals["demotions", "stored"]
    with side.ledger.copying_first():
        assert side.controller.reclaim(blocks, Urgency.RUNNING, "runs") > 0
    step_until(engine, lambda: totals["demotions", "stored"] == copies + 1)


@pytest.mark.parametrize(
    ("blocks", "server"),
    [(5, "tiers"), (5, "two_block_tiers"), (4, "two_block_tiers")],
)
def test_a_tail_goes_down_alone_and_comes_back(make_worker, request, blocks, server):
    """Its head stays in GPU memory, and is not copied."""
    tiers: TierServer = request.getfixturevalue(server)
    chunk = tiers.options.chunk_tokens
    engine = make_worker(num_blocks=64, ttl_s=60.0, linger=True, tiers=tiers)
    side, seed = engine.connector.side, 90 + 10 * blocks + chunk
    step_until(engine, lambda: side.lower.tier.takes_tails)
    engine.add("runs", prompt(seed, 30 * BLOCK), max_tokens=400, hints=hints("old"))
    engine.step()
    context = engine.turn_beside("a", prompt(seed + 1, 200), hints=hints("p"))
    reclaim(engine, blocks)
    tail = -(-blocks * BLOCK // chunk) * (chunk // BLOCK)  # in whole chunks
    assert engine.moved["tier_bytes:demoted"] == tail * CHUNK_BYTES
    use_free_memory(engine)
    context = engine.turn_beside("b", [*context, 5], hints=hints("p"))
    # The block at its beginning that GPU memory has is not written.
    assert engine.moved["tier_bytes:promoted"] == tail * CHUNK_BYTES
    totals = side.controller.metrics.totals
    assert totals["pins", "claimed"] == 1
    # The next turn owes its beginning still, and not what is below.
    reclaim(engine, 20)
    whole = (len(context) - 1) // chunk * (chunk // BLOCK)
    assert engine.moved["tier_bytes:demoted"] == whole * CHUNK_BYTES
    engine.abort("runs")
    engine.run()
    side.release_all()
    engine.settle()
    empty_gpu(engine)
    before = engine.moved["tier_bytes:promoted"]
    engine.turn("c", [*context, 6], hints=hints("p", last=True))
    assert engine.moved["tier_bytes:promoted"] - before == whole * CHUNK_BYTES
    engine.settle()
    assert tiers.clear_cpu()  # nothing that a lookup found is locked


def test_a_head_that_goes_while_its_turn_waits_for_its_tail(make_worker, tiers):
    """The lookup began behind it, and a new one begins before it."""
    engine = make_worker(num_blocks=64, ttl_s=60.0, linger=True)
    side = engine.connector.side
    step_until(engine, lambda: side.lower.tier.takes_tails)
    engine.add("runs", prompt(95, 40 * BLOCK), max_tokens=300, hints=hints("old"))
    engine.step()
    context = engine.turn_beside("a", prompt(96, 200), hints=hints("p"))
    reclaim(engine, 5)
    # It needs more than is free beside its pin.
    engine.add("b", [*context, *prompt(97, 200)], hints=hints("p", last=True))
    starts = side.lower.tier._lookups.starts
    step_until(engine, lambda: starts.of("b") == 7 * BLOCK)
    for _ in range(3):
        engine.step()
    reclaim(engine, 12)
    use_free_memory(engine)
    engine.abort("runs")
    engine.run()
    assert engine.finished["b"].num_output_tokens
    assert engine.moved["tier_bytes:promoted"] == 12 * CHUNK_BYTES
    side.release_all()
    engine.settle()
    assert tiers.clear_cpu()


def test_a_turn_whose_context_is_pinned_as_a_whole_asks_nothing(make_worker, tiers):
    """What follows it was never computed before: it begins in the step it came."""
    engine = make_worker(num_blocks=64, ttl_s=60.0, linger=True)
    half = engine.connector.side.lower.tier
    step_until(engine, lambda: half.takes_tails)
    asked: list[str] = []
    lookup = half._adapter.maybe_submit_lookup_request

    def note(request_id: str, *args: Any, **kwargs: Any) -> None:
        asked.append(request_id)
        lookup(request_id, *args, **kwargs)

    half._adapter.maybe_submit_lookup_request = note
    context = engine.turn("a", prompt(110, 200), hints=hints("p"))
    assert "a" in asked
    asked.clear()
    engine.add("b", [*context, *prompt(111, 100)], hints=hints("p"))
    engine.step()
    assert "b" in {r.request_id for r in engine.scheduler.running}
    engine.run()
    assert asked == []
    context = list(engine.finished["b"].all_token_ids)
    reclaim(engine, 5)
    use_free_memory(engine)
    asked.clear()
    engine.turn("c", [*context, *prompt(113, 100)], hints=hints("p", last=True))
    assert set(asked) == {"c"}, "its end is below"
    assert engine.moved["tier_bytes:promoted"] == 5 * CHUNK_BYTES


def test_what_an_answer_takes_of_a_pin_is_below_before(make_worker, tiers):
    """Or else what went down before it would be out of reach."""
    engine = make_worker(num_blocks=64, ttl_s=60.0, linger=True)
    side = engine.connector.side
    step_until(engine, lambda: side.lower.tier.takes_tails)
    context = engine.turn("a", prompt(120, 20 * BLOCK), hints=hints("p"))
    (pin,) = side.controller.pins
    whole = pin.kv_blocks
    # Its answer grows into the pin.
    engine.add("runs", prompt(121, 38 * BLOCK), max_tokens=250, hints=hints("old"))
    engine.run()
    assert 0 < pin.kv_blocks < whole - 4
    use_free_memory(engine)
    engine.turn("b", [*context, *prompt(122, 50)], hints=hints("p", last=True))
    given = whole - pin.kv_blocks
    assert engine.moved["tier_bytes:promoted"] == given * CHUNK_BYTES


def give_way_at_once(engine: Worker) -> int:
    """All pins give way to a waiting request; blocks that did not wait for a copy."""
    free = engine.pool.get_num_free_blocks()
    with engine.connector.side.ledger.copying_first():
        engine.connector.side.controller.reclaim(20, Urgency.RUNNING, "runs")
    return int(engine.pool.get_num_free_blocks() - free)


def test_what_is_below_is_free_at_once(make_worker, tiers):
    engine = make_worker(num_blocks=64, ttl_s=60.0, linger=True)
    side = engine.connector.side
    step_until(engine, lambda: side.lower.tier.takes_tails)
    engine.add("runs", prompt(130, 30 * BLOCK), max_tokens=400, hints=hints("old"))
    engine.step()
    context = engine.turn_beside("free-a", prompt(131, 190), hints=hints("p"))
    reclaim(engine, 20)
    use_free_memory(engine)
    context = engine.turn_beside("free-b", [*context, 5], hints=hints("p"))
    assert give_way_at_once(engine) == 12, "nothing new in whole chunks"
    use_free_memory(engine)
    engine.turn_beside("free-c", [*context, 6], hints=hints("p", last=True))
    assert engine.moved["tier_bytes:promoted"] == 24 * CHUNK_BYTES
    assert engine.moved["tier_bytes:demoted"] == 12 * CHUNK_BYTES


def test_what_was_wrongly_believed_below_is_prefilled_once(make_worker, tiers):
    """LMCache evicts without telling."""
    engine = make_worker(num_blocks=64, ttl_s=60.0, linger=True)
    side = engine.connector.side
    step_until(engine, lambda: side.lower.tier.takes_tails)
    engine.add("runs", prompt(132, 30 * BLOCK), max_tokens=400, hints=hints("old"))
    engine.step()
    request = engine.add("wrong-a", prompt(133, 190), hints=hints("p"))
    step_until(engine, request.is_finished)
    side.lower.tier._below.found(request.block_hashes, 0, 12 * BLOCK)
    assert give_way_at_once(engine) == 12
    use_free_memory(engine)
    context = [*request.all_token_ids, 5]
    context = engine.turn_beside("wrong-b", context, hints=hints("p"))
    reclaim(engine, 20)
    use_free_memory(engine)
    assert engine.moved["tier_bytes:demoted"] == 12 * CHUNK_BYTES
    assert engine.moved.get("tier_bytes:promoted", 0) == 0
    engine.turn_beside("wrong-c", [*context, 6], hints=hints("p", last=True))
    assert engine.moved["tier_bytes:promoted"] == 12 * CHUNK_BYTES


class PlainOptions(TierOptions):
    """LMCache's server as it is."""

    def _modules(self) -> tuple[str, ...]:
        return ()


def test_without_our_module_in_the_server_turns_go_down_whole(make_worker, tmp_path):
    """Its lookups would not find a tail alone."""
    options = PlainOptions(cpu_gb=0.1, chunk_tokens=BLOCK)
    with TierServer(options, tmp_path / "lmcache.log") as server:
        engine = make_worker(num_blocks=64, ttl_s=60.0, linger=True, tiers=server)
        tier = engine.connector.side.lower.tier
        engine.add("runs", prompt(99, 30 * BLOCK), max_tokens=400, hints=hints("old"))
        engine.step()
        engine.turn_beside("a", prompt(100, 200), hints=hints("p"))
        assert not tier.takes_tails  # it knows of no such question
        reclaim(engine, 5)
        assert engine.moved["tier_bytes:demoted"] == 12 * CHUNK_BYTES
        engine.close()


@pytest.mark.parametrize(
    ("mode", "linger", "server"),
    [
        ("expiry", False, "tiers"),
        ("expiry", True, "tiers"),
        ("expiry", True, "two_block_tiers"),
        ("write-through", True, "tiers"),
        ("idle-ahead", True, "tiers"),
    ],
)
def test_random_agents_on_a_small_pool(make_worker, request, mode, linger, server):
    """Expiry, claims, victims, preemptions, aborts: whatever comes, no wrong byte."""
    engine = make_worker(
        num_blocks=40,
        ttl_s=0.05,
        tiers=request.getfixturevalue(server),
        demote=mode,
        linger=linger,
        demote_wait_s=0.05,
        max_pinned_fraction=0.5,  # some pins hold a part of their turn only
    )
    rng = random.Random(7)
    # Contexts of their own: what an earlier case left below would be found.
    first = 100 * (2 * len(mode) + linger)
    contexts = {f"{mode}{i}": prompt(first + i, 60) for i in range(6)}
    running: dict[str, str] = {}
    deadline = time.monotonic() + WAIT_S
    # On a fast machine the first rounds are over before a pin expires.
    for number in itertools.count():
        both = {"tier_bytes:demoted", "tier_bytes:promoted"}
        if number >= 40 and both <= engine.moved.keys():
            break
        assert time.monotonic() < deadline, engine.moved
        name = rng.choice(sorted(contexts))
        if name not in running.values():
            request_id = f"{name}-{number}"
            tokens = [*contexts[name], *prompt(number, rng.randrange(1, 30))]
            if len(tokens) > 350:
                tokens = prompt(1000 + number, 60)
            last = rng.random() < 0.1
            engine.add(
                request_id,
                tokens,
                max_tokens=rng.randrange(2, 20),
                hints=hints(name, last=last),
            )
            running[request_id] = name
        for _ in range(rng.randrange(1, 8)):
            engine.step()
        if running and rng.random() < 0.05:
            victim = rng.choice(sorted(running))
            engine.abort(victim)
            del running[victim]
        for request_id in [r for r in running if r in engine.finished]:
            contexts[running.pop(request_id)] = list(
                engine.finished[request_id].all_token_ids
            )
        if rng.random() < 0.2:
            time.sleep(0.02)
    engine.run()
    if linger:
        # What lingers would stay for ever; what is being copied goes on.
        engine.connector.side.release_all()
    engine.settle()
    assert engine.pool.get_num_free_blocks() == 39


def test_a_server_that_dies_under_way(make_worker, tiers):
    """Loads fail, tokens are computed, nothing is wrong and nothing hangs."""
    engine = make_worker(num_blocks=200, **{"lmcache.mp.mq_timeout": 1.0})
    contexts = [
        engine.turn(f"first-{i}", prompt(500 + i, 100), hints=hints(f"d{i}"))
        for i in range(8)
    ]
    time.sleep(0.25)
    engine.settle()
    empty_gpu(engine)
    for index, context in enumerate(contexts):
        engine.add(f"next-{index}", [*context, 9], hints=hints(f"d{index}", last=True))
    engine.step()
    tiers.kill()
    began = time.monotonic()
    while any(f"next-{i}" not in engine.finished for i in range(8)):
        engine.step()
        assert time.monotonic() - began < WAIT_S
    assert engine.pool.get_num_free_blocks() == 199
    tiers.options = replace(tiers.options)
    tiers.start()
    deadline = time.monotonic() + WAIT_S
    while not engine.connector.side.lower.is_up():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    promoted = engine.moved.get("tier_bytes:promoted", 0)
    deadline = time.monotonic() + 3 * WAIT_S
    number = 0
    # The two roles notice each for itself that the server is back.
    while engine.moved.get("tier_bytes:promoted", 0) == promoted:
        assert time.monotonic() < deadline
        number += 1
        context = engine.turn(f"back-{number}", prompt(900, 100), hints=hints("back"))
        time.sleep(0.25)
        engine.settle()
        empty_gpu(engine)
        last = hints("back", last=True)
        engine.turn(f"again-{number}", [*context, 9], hints=last)
