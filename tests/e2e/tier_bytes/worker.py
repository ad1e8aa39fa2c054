"""vLLM's scheduler with our halves and a KV tensor, but no model.

The "forward pass" writes a fixed function of token and position into a real KV tensor,
and before every step each byte that vLLM believes to be computed is compared with it. A
block that was overwritten, mixed up, or read too early cannot hide.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.outputs import KVConnectorOutput

from ttlcache.types import ReleaseMode, Urgency
from ttlcache_connector.connector import TTLConnector
from ttlcache_connector.role.invariants import violations
from ttlcache_sim.harness import EngineHarness, EngineSpec, build_kv_cache_config

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
        self.on_step = self.check
        self.moved: dict[str, int] = {}
        self.closed = False

    def execute(self, output: Any) -> KVConnectorOutput | None:
        """As vLLM's model runner does it, on one rank."""
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
            kv_connector_worker_meta=self.worker.build_connector_worker_meta(),
        )
        report.failed_recving = done.failed_recving
        stats = self.worker.get_kv_connector_stats()
        for name, label, by in stats.data["counters"] if stats else ():
            key = f"{name}:{label}"
            self.moved[key] = self.moved.get(key, 0) + by
        self.worker.clear_connector_metadata()
        is_heard = output.total_num_scheduled_tokens or not report.is_empty()
        return report if is_heard else None

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
        role = self.connector.scheduler_role
        assert (
            violations(self.scheduler, role.parts.controller, role.parts.holder) == []
        )
        assert role.parts.faults.total == role.parts.lower.faults.total == 0
        assert self.worker.worker_role.faults.total == 0

    def settle(self) -> None:
        """Step until pins and copies have come to an end."""
        deadline = time.monotonic() + WAIT_S
        role = self.connector.scheduler_role
        while time.monotonic() < deadline:
            self.step()
            busy = role.parts.lower.tier.has_work() or role.parts.holder.references()
            if not busy and not len(role.parts.controller.pins):
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


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, 30_000) for _ in range(length)]


def empty_gpu(engine: Worker) -> None:
    """Nothing of it can be hit; what is below stays, unlike after a reset."""
    teardown = engine.connector.scheduler_role.teardown
    teardown.release_pins()
    teardown.drop_rest()
    assert engine.pool.reset_prefix_cache()
    engine.kv.fill_(-1)


def use_free_memory(engine: Worker) -> None:
    """As if others had computed something in all that is free now."""
    blocks = engine.pool.get_new_blocks(engine.pool.get_num_free_blocks())
    for block in blocks:
        engine.kv[block.block_id].fill_(-1)
    engine.pool.free_blocks(blocks)


def step_until(engine: Worker, reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not reached():
        assert time.monotonic() < deadline
        engine.step()
        time.sleep(0.005)


def hints(name: str, *, last: bool = False) -> dict[str, Any]:
    return {"program_id": name, "tool": "bash", "is_last_step": last}


def reclaim(engine: Worker, blocks: int) -> None:
    """As for a waiting request; returns when what gave way is below."""
    role = engine.connector.scheduler_role
    totals = role.parts.controller.telemetry.metrics.totals
    copies = totals["demotions", "stored"]
    reclaimed = role.parts.controller.memory.reclaim(
        blocks, Urgency.RUNNING, "runs", mode=ReleaseMode.COPY_FIRST
    )
    assert reclaimed > 0
    step_until(engine, lambda: totals["demotions", "stored"] == copies + 1)


def play_random_agents(
    engine: Worker, mode: str, is_enough: Callable[[int], bool], first_seed: int = 0
) -> None:
    """Six agents whose turns expire, claim, give way, are preempted or aborted.

    Args:
        mode: `demote`.
        is_enough: asked with the number of each round.
        first_seed: of their contexts.
    """
    rng = random.Random(7)
    contexts = {f"{mode}{i}": prompt(first_seed + i, 60) for i in range(6)}
    running: dict[str, str] = {}
    deadline = time.monotonic() + WAIT_S
    for number in itertools.count():
        if is_enough(number):
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
    if mode != "on-expiry":
        # What lingers would stay for ever; what is being copied goes on.
        engine.connector.scheduler_role.teardown.release_all()
    engine.settle()
