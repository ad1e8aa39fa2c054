"""`python -m bench overhead --scheduler`: all engines do the same work."""

from __future__ import annotations

import pytest
from rich.console import Console

from bench.micro.overhead_scheduler import (
    IDLE,
    LOADS,
    OURS,
    PLAIN,
    Paired,
    _Engine,
    measure,
    print_table,
    to_json,
)
from ttlcache_sim import idle_connector
from ttlcache_sim.idle_connector import IdleConnector

RUNNING, WAITING = 6, 8


@pytest.fixture(autouse=True)
def _registered():
    idle_connector.register()
    idle_connector.register()


@pytest.mark.parametrize("load", LOADS)
def test_all_engines_serve_the_same(load):
    engines = [_Engine(kind, load, RUNNING, WAITING) for kind in (PLAIN, IDLE, OURS)]
    plain, idle, ours = (engine.harness.scheduler for engine in engines)
    assert plain.connector is None
    assert isinstance(idle.connector, IdleConnector)
    assert type(idle) is type(plain)
    for _ in range(150):
        for engine in engines:
            assert engine.step() > 0
        running = [request.request_id for request in plain.running]
        assert [request.request_id for request in idle.running] == running
        assert len(ours.running) == len(running)
        if load != "turnover":
            assert len(running) == RUNNING
    if load == "turnover":
        assert ours.connector.scheduler_role.parts.controller.pins
    assert len(ours.waiting) == len(plain.waiting)
    # What keeps the others waiting is what the load says.
    assert (plain.max_num_running_reqs > RUNNING) == (load == "memory")


def result(ours_ms: float, more_ms: float) -> Paired:
    return Paired("seats", 10, 2.0, ours_ms, 2.0, ours_ms, more_ms, 2.01, 0.01, 0.02)


def test_both_bars_count(capsys):
    console = Console(width=160)
    assert print_table([result(2.1, 0.09)], console)
    assert not print_table([result(2.1, 0.11)], console)
    assert not print_table([result(2.3, 0.09)], console)
    assert "any connector" in capsys.readouterr().out


def test_the_numbers_add_up():
    paired = measure("seats", 20, RUNNING, WAITING)
    (row,) = to_json([paired])["rows"]
    assert row["steps"] == 20
    assert row["ratio"] == pytest.approx(row["ours_ms"] / row["plain_ms"], abs=0.01)
    assert min(row["plain_ms"], row["idle_ms"], row["ours_ms"]) > 0
