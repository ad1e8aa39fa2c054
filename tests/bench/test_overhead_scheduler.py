"""`python -m bench overhead --scheduler`: all engines do the same work."""

import pytest

from bench.micro.overhead_scheduler import IDLE, LOADS, OURS, PLAIN, _Engine
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
