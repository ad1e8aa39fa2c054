"""One cell: workload x engine x arm x seed, from arguments to checked numbers."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from ttlcache.clock import VirtualClock, stopwatch_s, use_clock
from ttlcache_connector.connector import TTLConnector, find_connector
from ttlcache_sim.checks import check
from ttlcache_sim.engine import Simulation
from ttlcache_sim.gates import controller_of
from ttlcache_sim.harness import EngineHarness, EngineSpec
from ttlcache_sim.load.agents import Agent, RequestFactory
from ttlcache_sim.load.reshape import mean_context
from ttlcache_sim.load.workload import Workload, build
from ttlcache_sim.metrics import Steady, steady
from ttlcache_sim.recorder import Recorder
from ttlcache_sim.settings import Cell, CellResult
from ttlcache_sim.steps.hardware import HARDWARE
from ttlcache_sim.steps.models import MODELS
from ttlcache_sim.tiers import link
from ttlcache_sim.tiers.lookups import remember_lookups
from ttlcache_sim.tiers.offload import parse_offload
from ttlcache_sim.tiers.policy import tiered
from ttlcache_sim.tiers.store import TierStore

_SCHEDULER = "ttlcache_connector.scheduler.TTLScheduler"


def run_cell(cell: Cell, workload: Workload | None = None) -> CellResult:
    """Simulate and check.

    Args:
        workload: in place of what the cell names.

    Raises:
        SimulationError: stuck, or a conservation law is broken.
    """
    wall = Wall()
    workload = workload or build(cell.workload)
    clock, recorder, store = VirtualClock(), Recorder(), _tier_store(cell)
    with no_gc(), use_clock(clock), link.use_tiers(store):
        scheduler, connector = new_engine(engine_spec(cell, workload))
        if store is not None and connector is not None:
            # There is no disk without host memory above it.
            controller_of(connector).tier_knowledge.on_reload_source("cpu")
        Simulation(
            scheduler,
            clock,
            workload,
            request_factory(cell),
            cell.engine.step_time,
            recorder,
            gate=cell.arm.new_gate(cell, connector),
            connector=connector,
            tiers=getattr(scheduler.connector, "tiers", None),
            longest_stride=cell.engine.decode_stride,
            block_tokens=cell.engine.block_size,
        ).run()
        check(workload, recorder, scheduler, connector)
    metrics = recorder.metrics(block_bytes(cell))
    metrics["reload_s"] = store.reload_s if store is not None else 0.0
    metrics["reload_tokens"] = store.loaded_tokens if store is not None else 0
    metrics["connector"] = connector_counts(connector)
    return CellResult(
        metrics, wall.seconds(), asdict(steady_of(cell, workload, recorder))
    )


def steady_of(cell: Cell, workload: Workload, recorder: Recorder) -> Steady:
    """Without warm-up and drain."""
    ids = [program.program_id for program in workload.programs]
    spec = cell.workload
    return steady(recorder.turns, ids, spec.warm_up, spec.drain)


class Wall:
    """Seconds of this machine since it was made."""

    def __init__(self) -> None:
        self._began = stopwatch_s(), time.process_time()

    def seconds(self) -> dict[str, float]:
        wall_s, cpu_s = self._began
        return {
            "wall_s": stopwatch_s() - wall_s,
            "cpu_s": time.process_time() - cpu_s,
        }


def block_bytes(cell: Cell) -> int:
    """Of a block of the pool."""
    return MODELS[cell.engine.model].kv_bytes_per_token * cell.engine.block_size


def new_engine(spec: EngineSpec) -> tuple[Any, TTLConnector | None]:
    """vLLM's scheduler, and its TTLConnector if it has one."""
    scheduler = EngineHarness(spec).scheduler
    remember_lookups(scheduler.kv_cache_manager)
    return scheduler, find_connector(scheduler.connector)


@contextmanager
def no_gc() -> Iterator[None]:
    """A cell makes millions of small objects and hardly a cycle."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
        gc.collect()


def _tier_store(cell: Cell) -> TierStore | None:
    offload = parse_offload(cell.engine.offload)
    if not offload:
        return None
    model = MODELS[cell.engine.model]
    hardware = HARDWARE[cell.engine.hardware]
    return TierStore(offload, hardware, model.kv_bytes_per_token, model.tp)


def engine_spec(cell: Cell, workload: Workload) -> EngineSpec:
    engine = cell.engine
    context = round(mean_context(workload.programs))
    prefill_s = engine.step_time.prefill_s(context, engine.max_num_batched_tokens)
    above_tier = engine.offload != "none"
    extra = cell.arm.engine_config(prefill_s, above_tier=above_tier)
    spec: dict[str, Any] = {
        "num_blocks": engine.blocks,
        "block_tokens": engine.block_size,
        "max_num_seqs": engine.max_num_seqs,
        "max_num_batched_tokens": engine.max_num_batched_tokens,
        "max_model_len": engine.max_context,
        "policy": "priority" if cell.arm.tell_work else "fcfs",
        "connector": extra is not None,
        "extra_config": extra or {},
    }
    if above_tier:
        link.register()
        spec["connector"] = True
        spec["kv_connector"] = link.PLAIN
        if extra is not None:
            spec["kv_connector"] = link.WITH_PINS
            spec["scheduler_cls"] = _SCHEDULER
            spec["extra_config"] = tiered(extra)
    return EngineSpec(**spec)


def request_factory(cell: Cell) -> RequestFactory:
    def work_ms(agent: Agent) -> int:
        return round(1e3 * step_time.work_s(*agent.remaining_tokens()))

    step_time = cell.engine.step_time
    return RequestFactory(
        cell.engine.block_size,
        tell_last=cell.engine.tell_last,
        repeat_output=cell.engine.repeat_output,
        shared_tokens=cell.workload.shared_tokens,
        tell_gap=cell.arm.tell_gap,
        priority=work_ms if cell.arm.tell_work else None,
    )


def connector_counts(connector: TTLConnector | None) -> dict[str, Any]:
    """The connector's own counters, as "name" or "name.label"."""
    if connector is None or connector.scheduler_role is None:
        return {}
    controller = connector.scheduler_role.parts.controller
    totals = controller.telemetry.metrics.totals
    return {
        f"{name}.{label}" if label else name: count
        for (name, label), count in sorted(totals.items())
    }
