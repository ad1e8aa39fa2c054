"""Drives a random engine: several steps in flight, drafts, invariants each step."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from bench.stress.wedge.loading import Elsewhere, HostCopies, fill
from bench.stress.wedge.spec import RandomEngine
from ttlcache.clock import VirtualClock
from ttlcache_connector.role.invariants import violations
from ttlcache_connector.tiers.base import TierMetadata
from ttlcache_sim.harness import (
    EngineHarness,
    EngineSpec,
    build_vllm_config,
    next_tokens,
)

#: Steps in a row in which nothing ran although something waited: a wedge.
WEDGE_STEPS = 3
_MAX_CONFIGS = 256
_configs: dict[str, VllmConfig] = {}


class ScheduleFailure(AssertionError):
    """A wedge, a leak or a broken invariant."""


def _config(spec: EngineSpec) -> VllmConfig:
    """Of equal specs built once; so many are kept."""
    key = repr(spec)
    if key not in _configs:
        if len(_configs) >= _MAX_CONFIGS:
            _configs.clear()
        _configs[key] = build_vllm_config(spec)
    return _configs[key]


class _Harness(EngineHarness):
    copies: HostCopies | None = None

    def execute(self, output: SchedulerOutput) -> KVConnectorOutput | None:
        metadata = output.kv_connector_metadata
        if self.copies is None or not isinstance(metadata, TierMetadata):
            return None
        return self.copies.execute(metadata)


@dataclass
class DrivenEngine:
    """One real scheduler and its steps in flight."""

    random_engine: RandomEngine
    rng: random.Random
    clock: VirtualClock
    harness: _Harness = field(init=False)
    elsewhere: Elsewhere | None = None
    steps: int = 0
    stuck_steps: int = 0

    def __post_init__(self) -> None:
        spec = self.random_engine.engine
        config = _config(spec)
        self.harness = _Harness(spec, config, self.random_engine.depth)
        if self.random_engine.has_cpu_tier:
            rng = random.Random(repr(self.random_engine))
            pace, failing = rng.choice((0.1, 0.5, 1.0)), rng.choice((0.0, 0.2))
            self.harness.copies = HostCopies(rng, pace, failing)
        self.harness.worker_says = self._worker_says
        if self.random_engine.max_programs is not None:
            programs = self.role.parts.controller.programs
            programs.max_programs = self.random_engine.max_programs
        if self.random_engine.drafts:
            self.harness.on_output = self._propose
        if self.random_engine.loads is not None:
            loads = self.random_engine.loads
            self.elsewhere = Elsewhere(self.rng, spec.block_tokens, loads)
            fill(self.scheduler.connector, self.elsewhere)
        if self.random_engine.worker_faults or self.elsewhere is not None:
            recompute = self.rng.random() < 0.5  # kv_load_failure_policy
            self.scheduler.recompute_kv_load_failures = recompute

    @property
    def scheduler(self) -> Any:
        return self.harness.scheduler

    @property
    def role(self) -> Any:
        return self.harness.connector.scheduler_role

    def step(self) -> None:
        """One engine step; raises `ScheduleFailure`."""
        moves = self._moves()
        output = self.harness.step()
        self.steps += 1
        self._watch(output, moved=self._moves() != moves)
        self.check()

    def check(self) -> None:
        parts = self.role.parts
        broken = violations(self.scheduler, parts.controller, parts.holder)
        if faults := parts.faults.total + parts.lower.faults.total:
            broken.append(f"{faults} exceptions in our hooks")
        if broken:
            raise ScheduleFailure("; ".join(broken[:3]))

    @property
    def is_loading(self) -> bool:
        """Whether KV from elsewhere is on its way, be it to an aborted request."""
        copies = self.harness.copies
        if copies is not None and copies.is_pending:
            return True
        return self.elsewhere is not None and self.elsewhere.is_pending

    def holds_blocks_waiting(self) -> bool:
        """Whether a request that does not run holds blocks, or one that is gone."""
        block_ids = self.scheduler.kv_cache_manager.get_block_ids
        running = {request.request_id for request in self.scheduler.running}
        waiting = self.scheduler.requests.keys() - running
        return self.is_loading or any(any(block_ids(name)) for name in waiting)

    def _end_sessions(self) -> bool:
        """Streaming sessions keep their blocks while they wait, for their clients or
        for memory, and vLLM alone waits then: clients leave. Whether there were any."""
        sessions = [
            request.request_id
            for request in self.scheduler.requests.values()
            if request.resumable
            and request.num_computed_tokens
            and not request.is_finished()
        ]
        for request_id in sessions:
            self.harness.abort(request_id)
        self.stuck_steps = 0
        return bool(sessions)

    def _moves(self) -> tuple[int, int]:
        """Differs where loads, or copies before blocks are freed, went on."""
        copies = self.harness.copies
        if copies is not None:
            return copies.moves, self.harness.pool.get_num_free_blocks()
        return (0 if self.elsewhere is None else self.elsewhere.moves), 0

    def _watch(self, output: SchedulerOutput, *, moved: bool) -> None:
        waiting = [
            request
            for request in self.scheduler.requests.values()
            if request.status != RequestStatus.WAITING_FOR_STREAMING_REQ
            and not request.is_finished()  # aborted, its load under way
        ]
        idle = not output.total_num_scheduled_tokens and not self.scheduler.running
        if idle and waiting and self._pass_patience():
            return
        stuck = idle and waiting and not moved and not self.is_loading
        self.stuck_steps = self.stuck_steps + 1 if stuck else 0
        if self.stuck_steps >= WEDGE_STEPS and not self._end_sessions():
            pins = len(self.role.parts.controller.pins)
            raise ScheduleFailure(
                f"wedge: nothing runs, {len(waiting)} wait, {pins} pins, "
                f"{self.harness.pool.get_num_free_blocks()} free blocks"
            )

    def take_finished(self) -> dict[str, list[int]]:
        """Contexts of the requests that ended since the last call."""
        finished, self.harness.finished = self.harness.finished, {}
        return {rid: list(r.all_token_ids) for rid, r in finished.items()}

    def _pass_patience(self) -> bool:
        """Whether a pin's patience kept the engine idle; if so, until that is over."""
        now_s = self.clock.now_s()
        pins = self.role.parts.controller.pins
        ends_s = [p.stall_until_s for p in pins if p.stall_until_s > now_s]
        if not ends_s:
            return False
        self.clock.set(min(ends_s))
        return True

    def _worker_says(self) -> KVConnectorOutput | None:
        """What the worker reports of a step: loads that arrived, bad blocks."""
        if self.elsewhere is not None:
            return self.elsewhere.report(idle=not self.scheduler.running)
        return self._bad_blocks()

    def _bad_blocks(self) -> KVConnectorOutput | None:
        """Now and then blocks of a running request are bad."""
        running = self.scheduler.running
        if not self.random_engine.worker_faults or not running:
            return None
        if self.rng.random() > 0.02:
            return None
        request = self.rng.choice(running)
        (block_ids,) = self.scheduler.kv_cache_manager.get_block_ids(request.request_id)
        if not block_ids:
            return None
        return KVConnectorOutput(invalid_block_ids={self.rng.choice(block_ids)})

    def _propose(self, requests: list[Request]) -> None:
        drafts = []
        for request in requests:
            good = next_tokens(request, self.random_engine.drafts)
            if self.rng.random() < 0.4:
                good[self.rng.randrange(len(good))] = 3
            drafts.append(good)
        self.scheduler.update_draft_token_ids(
            DraftTokenIds([r.request_id for r in requests], drafts)
        )
