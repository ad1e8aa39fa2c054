"""From the controller's buffer to vLLM's Prometheus registry."""

from __future__ import annotations

import re

import msgspec
import pytest
from prometheus_client import REGISTRY, Counter, Gauge, Histogram, generate_latest

from tests.connector.conftest import start
from tests.connector.injection import Injector, paused
from tests.test_monitoring import INCREASES
from ttlcache.telemetry.metrics import COUNTERS, GAUGES
from ttlcache.types import PinOutcome
from ttlcache_connector.connector import TTLConnector
from ttlcache_connector.http import middleware
from ttlcache_connector.role.status import EVENT_INTERVAL_S

TYPES = {Counter: Counter, Gauge: Gauge, Histogram: Histogram}


def build_metrics(make_engine, ranks: int):
    config = make_engine(num_blocks=40).config
    labels = {rank: ["m", str(rank)] for rank in range(ranks)}
    names = ["model_name", "engine"]
    return TTLConnector.build_prom_metrics(config, TYPES, names, labels)


@pytest.fixture
def prom(make_engine):
    """vLLM's frontend above two engines."""
    middleware._counters()  # this process has them for good
    before = set(REGISTRY._collector_to_names)
    yield build_metrics(make_engine, 2)
    for collector in set(REGISTRY._collector_to_names) - before:
        REGISTRY.unregister(collector)


def sample(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(name, {"model_name": "m", **labels})


def test_loggers_that_vllm_makes_anew_get_metrics_too(prom, make_engine):
    """As at `/scale_elastic_ep`, which adds ranks: vLLM forgets its own before."""
    again = build_metrics(make_engine, 3)
    again.observe({"counters": [["pins_started", "", 2]]}, engine_idx=2)
    assert sample("ttlcache_pins_started_total", engine="2") == 2
    prom.observe({"counters": [["pins_started", "", 1]]})  # of the old loggers
    assert sample("ttlcache_pins_started_total", engine="0") == 0


def test_an_engine_without_requests_shows_few_lines(prom):
    page = generate_latest().decode().splitlines()
    own = [s for s in page if s.startswith("ttlcache_") and 'engine="0"' in s]
    assert len(own) < 120
    for outcome in PinOutcome:
        assert sample("ttlcache_pins_total", engine="0", outcome=outcome) == 0.0
    for name in (*GAUGES, *(n for n, (_, label) in COUNTERS.items() if not label)):
        suffix = "" if name in GAUGES else "_total"
        assert sample(f"ttlcache_{name}{suffix}", engine="0") is not None


@pytest.mark.parametrize(("name", "expression"), INCREASES)
def test_an_alert_sees_the_first_of_its_kind(prom, name, expression):
    """`increase` sees no step to 1 in a series that begins with it.

    It has shown 0 before, or the alert asks for new series, too.
    """
    shown = {re.split("[{ ]", s)[0] for s in generate_latest().decode().splitlines()}
    assert name in shown or f"{name} unless {name} offset" in expression


def test_events_travel_serialised_and_arrive_under_their_names(prom, make_engine):
    role = make_engine(num_blocks=40).role
    metrics = role.parts.controller.telemetry.metrics
    metrics.count("pins", "claimed")
    metrics.observe("gap_seconds", 1.5)
    stats = role.status.take_stats()
    payload = msgspec.msgpack.decode(msgspec.msgpack.encode(stats.to_dict()))
    prom.observe(payload, engine_idx=1)
    assert sample("ttlcache_pins_total", engine="1", outcome="claimed") == 1
    assert sample("ttlcache_pins_total", engine="0", outcome="claimed") == 0
    assert sample("ttlcache_gap_seconds_sum", engine="1") == 1.5
    assert sample("ttlcache_pool_blocks", engine="1") == 39


def test_aggregating_adds_up(make_engine):
    build = TTLConnector.build_kv_connector_stats
    one = build({"counters": [["pins", "claimed", 2]], "observations": {"x": [1.0]}})
    two = build({"counters": [["pins", "claimed", 3]], "gauges": {"pins_active": 4}})
    both = one.aggregate(two)
    assert both.reduce() == {"ttlcache pins claimed": 5, "ttlcache pins_active": 4}
    assert not both.is_empty()
    both.reset()
    assert both.is_empty()


def test_a_fault_while_reporting_loses_no_count(make_engine):
    engine = make_engine(num_blocks=40)
    role = engine.role
    role.parts.controller.telemetry.metrics.count("pins", "claimed")
    injector = Injector(1)
    injector.install(role, "pressure")
    assert role.status.take_stats() is None
    with paused(injector):
        counters = role.status.take_stats().data["counters"]
    assert ["pins", "claimed", 1] in counters
    assert ["hook_errors", "take_stats", 1] in counters


def test_events_wait_a_moment_while_requests_run_and_none_is_lost(make_engine, clock):
    engine = make_engine(num_blocks=40)
    role = engine.role
    take, count = role.status.take_stats, role.parts.count
    assert take() is not None
    assert take() is None  # nothing is sent while nothing happens
    engine.add("A-1", range(100), max_tokens=8, hints={"program_id": "A"})
    engine.step()
    clock.advance(1.5)
    assert take() is not None
    count("pins", "claimed")
    assert role.parts.engine.num_running() == 1
    assert take() is None
    clock.advance(2 * EVENT_INTERVAL_S)
    assert take().data["counters"] == [["pins", "claimed", 1]]
    count("pins", "expired")
    engine.abort("A-1")
    assert role.parts.engine.num_running() == 0
    assert ["pins", "expired", 1] in take().data["counters"]


def test_what_routers_ask_for(make_engine, clock):
    """Two programs fit into 39 blocks of 16 tokens, the third one waits."""
    engine = make_engine(num_blocks=40)

    def gauges() -> dict[str, float]:
        clock.advance(1.5)
        return engine.role.status.take_stats().data["gauges"]

    for program in "ABC":
        start(engine, program, 256)
    start(engine, "C", 256, base=9, turn=2)  # of one program, two requests
    engine.step()
    waiting = gauges()
    assert waiting["waiting_programs"] == 1
    assert waiting["free_blocks"] < 256 / 16
    engine.run()
    assert gauges()["waiting_programs"] == 0
