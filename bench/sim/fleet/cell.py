"""A cell of many replicas, from arguments to checked numbers."""

from __future__ import annotations

from typing import Any

from bench.sim.cell import (
    Wall,
    block_bytes,
    connector_counts,
    engine_spec,
    new_engine,
    no_gc,
    request_factory,
    step_time_of,
)
from bench.sim.checks import check_engine, check_turns, raise_broken
from bench.sim.fleet.fleet import Fleet, Replica, load_imbalance
from bench.sim.fleet.routing import ROUTERS, Seen
from bench.sim.harness import EngineSpec
from bench.sim.load.agents import RequestFactory
from bench.sim.load.workload import Workload, build
from bench.sim.recorder import Recorder, merged
from bench.sim.rivals.gates import Gate
from bench.sim.settings import Cell, CellResult
from bench.sim.steptime import StepTime
from ttlcache.clock import VirtualClock, use_clock
from ttlcache_connector.connector import TTLConnector

_NOBODY = Workload(())


class _Engines:
    """Makes replicas, and keeps what is to be counted and checked afterwards."""

    def __init__(self, cell: Cell, spec: EngineSpec, step_time: StepTime) -> None:
        self._cell, self._spec, self._step_time = cell, spec, step_time
        self.recorders: list[Recorder] = []
        self.schedulers: list[Any] = []
        self.connectors: list[TTLConnector | None] = []
        self._factory: RequestFactory = request_factory(cell, step_time)

    def make(self, seen: Seen) -> Replica:
        clock, recorder = VirtualClock(), Recorder()
        with use_clock(clock):
            scheduler, connector = new_engine(self._spec)
            self.recorders.append(recorder)
            self.schedulers.append(scheduler)
            self.connectors.append(connector)
            return Replica(
                scheduler,
                clock,
                _NOBODY,
                self._factory,
                self._step_time,
                recorder,
                gate=Gate(),
                connector=connector,
                longest_stride=self._cell.engine.decode_stride,
                block_tokens=self._cell.engine.block_size,
                seen=seen,
            )


def run_fleet(cell: Cell) -> CellResult:
    """Simulate and check.

    Raises:
        SimulationError: a replica is stuck, or a conservation law is broken.
    """
    assert cell.fleet is not None
    wall = Wall()
    workload = build(cell.workload)
    step_time = step_time_of(cell)
    with no_gc():
        engines = _Engines(cell, engine_spec(cell, workload, step_time), step_time)
        fleet = Fleet(
            engines.make,
            cell.fleet.replicas,
            workload,
            ROUTERS[cell.fleet.routing](),
            shared_tokens=cell.workload.shared_tokens,
        )
        fleet.run()
        recorder = merged(engines.recorders)
        _check(workload, recorder, fleet, engines)
    metrics = recorder.metrics(block_bytes(cell))
    metrics |= {
        "reload_s": 0.0,
        "reload_tokens": 0,
        "moved_turns": fleet.moved,
        "moved_share": fleet.moved / max(1, fleet.turns - len(workload.programs)),
        "load_imbalance": load_imbalance([r.busy_s for r in engines.recorders]),
        "connector": _summed(engines.connectors),
    }
    return CellResult(metrics, wall.seconds())


def _check(
    workload: Workload, recorder: Recorder, fleet: Fleet, engines: _Engines
) -> None:
    broken = check_turns(workload, recorder)
    for replica, scheduler, connector in zip(
        fleet.replicas, engines.schedulers, engines.connectors, strict=True
    ):
        found = check_engine(scheduler, connector)
        broken += [f"replica {replica.seen.index}: {text}" for text in found]
    raise_broken(broken)


def _summed(connectors: list[TTLConnector | None]) -> dict[str, Any]:
    counts: dict[str, Any] = {}
    for connector in connectors:
        for name, count in connector_counts(connector).items():
            counts[name] = counts.get(name, 0) + count
    return dict(sorted(counts.items()))
