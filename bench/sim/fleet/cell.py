"""A cell of many replicas, from arguments to checked numbers."""

from __future__ import annotations

from collections import Counter
from typing import Any

from bench.sim.fleet.fleet import Fleet, Replica, load_imbalance
from bench.sim.fleet.routing import ROUTERS, Seen
from bench.sim.settings import Cell
from ttlcache.clock import VirtualClock, use_clock
from ttlcache_connector.connector import TTLConnector
from ttlcache_sim.cell import (
    Wall,
    block_bytes,
    connector_counts,
    engine_spec,
    new_engine,
    no_gc,
    request_factory,
)
from ttlcache_sim.checks import check_engine, check_turns, raise_broken
from ttlcache_sim.gates import Gate
from ttlcache_sim.load.workload import Workload, build
from ttlcache_sim.recorder import Recorder, merged
from ttlcache_sim.settings import CellResult


def run_fleet(cell: Cell) -> CellResult:
    """Simulate and check.

    Raises:
        SimulationError: a replica is stuck, or a conservation law is broken.
    """
    assert cell.fleet is not None
    wall = Wall()
    workload = build(cell.workload)
    spec, factory = engine_spec(cell, workload), request_factory(cell)
    engines: list[tuple[Any, TTLConnector | None]] = []
    recorders: list[Recorder] = []

    def make_replica(seen: Seen) -> Replica:
        clock = VirtualClock()
        recorders.append(Recorder())
        with use_clock(clock):
            engines.append(new_engine(spec))
            scheduler, connector = engines[-1]
            return Replica(
                scheduler,
                clock,
                Workload(()),
                factory,
                cell.engine.step_time,
                recorders[-1],
                gate=Gate(),
                connector=connector,
                longest_stride=cell.engine.decode_stride,
                block_tokens=cell.engine.block_size,
                seen=seen,
            )

    with no_gc():
        router = ROUTERS[cell.fleet.routing]()
        fleet = Fleet(make_replica, cell.fleet.replicas, workload, router)
        fleet.run()
        recorder = merged(recorders)
        broken = check_turns(workload, recorder)
        for index, engine in enumerate(engines):
            broken += [f"replica {index}: {law}" for law in check_engine(*engine)]
        raise_broken(broken)
    counts: Counter[str] = Counter()
    for _, connector in engines:
        counts.update(connector_counts(connector))
    metrics = recorder.metrics(block_bytes(cell))
    metrics |= {
        "reload_s": 0.0,
        "reload_tokens": 0,
        "moved_turns": fleet.moved,
        "moved_share": fleet.moved / max(1, fleet.turns - len(workload.programs)),
        "load_imbalance": load_imbalance([each.busy_s for each in recorders]),
        "connector": dict(sorted(counts.items())),
    }
    return CellResult(metrics, wall.seconds())
