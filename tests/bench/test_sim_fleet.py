"""Many replicas in one virtual time: routers, conservation, rollouts."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

pytest.importorskip("vllm")

from bench.cli import app
from bench.sim.fleet import cell as fleet_cell_module
from bench.sim.fleet.cell import run_fleet
from bench.sim.fleet.fleet import Replica
from bench.sim.fleet.routing import (
    BALANCE_ABS_THRESHOLD,
    ROUTERS,
    CacheAware,
    Seen,
    Session,
    Sticky,
)
from bench.sim.rivals.arms import parse_arms
from bench.sim.settings import Cell, EngineSetting, FleetSetting
from tests.commands import output_of
from ttlcache_sim import cell as cell_module
from ttlcache_sim.cell import run_cell
from ttlcache_sim.checks import SimulationError
from ttlcache_sim.engine import Simulation
from ttlcache_sim.load.agents import Agent
from ttlcache_sim.load.feed import Feed, Loop, parse_loop
from ttlcache_sim.load.programs import Program, Turn
from ttlcache_sim.load.workload import Workload, WorkloadSpec, build

ENGINE = EngineSetting(blocks=1_000, max_num_batched_tokens=1024)
LOAD = WorkloadSpec(
    "swe", programs=12, rate=2.0, seed=1, max_context=ENGINE.max_context // 4
)


def agent(name: str) -> Agent:
    turns = (Turn(100, 10, "bash", 1.0), Turn(50, 10, "bash", 1.0))
    return Agent(0, Program(name, 0.0, turns))


def cell(routing: str, arm: str = "adaptive") -> Cell:
    return Cell(parse_arms(arm)[0], ENGINE, LOAD, FleetSetting(3, routing))


@cache
def served(routing: str) -> dict[str, Any]:
    """Metrics of a fleet; raises where a law is broken."""
    return run_fleet(cell(routing)).metrics


# --- routers -----------------------------------------------------------------


def test_sticky_starts_where_fewest_programs_are():
    router, seen = Sticky(), [Seen(0, programs=2), Seen(1, programs=1)]
    one = agent("one")
    assert router.route(one, seen).index == 1
    seen[1].programs = 9
    assert router.route(one, seen).index == 1


def test_cache_aware_follows_the_longest_prefix_unless_out_of_balance():
    router, seen = CacheAware(), [Seen(0), Seen(1)]
    one = agent("one")
    seen[1].sent(one)
    seen[1].in_flight = BALANCE_ABS_THRESHOLD
    assert router.route(one, seen).index == 1
    seen[1].in_flight += 1
    assert router.route(one, seen).index == 0


# --- fleets ------------------------------------------------------------------


@pytest.mark.parametrize("routing", list(ROUTERS))
def test_every_router_serves_every_turn(routing):
    metrics = served(routing)
    assert metrics["num_programs"] == 12
    assert metrics["moved_turns"] == 0 or routing == "cache-aware"


@pytest.mark.parametrize(
    "arm", ["cachettl", pytest.param("vllm", marks=pytest.mark.nightly)]
)
def test_replicas_behind_a_static_router_are_engines_alone(arm, monkeypatch):
    """Each serves what it would serve without the others, to the last digit."""
    both = run_fleet(cell("session", arm)).metrics
    programs = build(LOAD).programs
    router, seen = Session(), [Seen(index) for index in range(3)]
    parts: dict[int, list[Program]] = {}
    for index, program in enumerate(programs):
        home = router.route(Agent(index, program), seen).index
        parts.setdefault(home, []).append(program)
    # The cold start's TTL comes from the mean context: keep that of all programs.
    spec = cell_module.engine_spec
    whole = Workload(programs)
    monkeypatch.setattr(cell_module, "engine_spec", lambda c, w: spec(c, whole))
    alone = []
    for own in parts.values():
        monkeypatch.setattr(cell_module, "build", lambda _, own=own: Workload(own))
        alone.append(run_cell(Cell(parse_arms(arm)[0], ENGINE, LOAD)).metrics)
    assert both["steps"] == sum(each["steps"] for each in alone)
    total_s = sum(each["mean_jct_s"] * each["num_programs"] for each in alone)
    assert both["mean_jct_s"] * 12 == pytest.approx(total_s, rel=1e-12)
    assert both["cached_tokens"] == sum(each["cached_tokens"] for each in alone)


def test_same_fleet_same_numbers():
    assert run_fleet(cell("cache-aware")).metrics == served("cache-aware")


def test_a_leak_on_one_replica_is_found(monkeypatch):
    monkeypatch.setattr(
        fleet_cell_module, "check_engine", lambda scheduler, connector: ["a leak"]
    )
    with pytest.raises(SimulationError, match="replica 2: a leak"):
        run_fleet(cell("session"))


def test_a_turn_that_gets_lost_is_an_error_and_no_endless_loop(monkeypatch):
    monkeypatch.setattr(Replica, "send", lambda self, agent, time_s: None)
    with pytest.raises(SimulationError, match="12 programs are left"):
        run_fleet(cell("sticky"))


def test_the_command_line_compares_routings(tmp_path):
    out = tmp_path / "fleet.json"
    arguments = ["sim", "--replicas", "2", "--routing", "session,sticky"]
    arguments += ["--arms", "adaptive", "--programs", "4", "--rate", "1.0"]
    arguments += ["--blocks", "2000", "--no-cache", "--processes", "1"]
    output_of(app, *arguments, "--out", out)
    rows = json.loads(out.read_text())["cells"]
    names = [row["arm"] for row in rows]
    assert names == ["adaptive @ session", "adaptive @ sticky"]
    assert all(row["metrics"]["num_programs"] == 4 for row in rows)


# --- loops -------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["closed:0", "closed:", "rollout:4", "rollout:4:0", "rollout:4:101"]
)
def test_loops_that_mean_nothing_are_refused(text):
    with pytest.raises(ValueError, match="arrivals"):
        parse_loop(text)


def test_the_next_batch_starts_when_enough_of_this_one_have_ended():
    agents = [agent(f"p{number}") for number in range(8)]
    feed = Feed(agents, Loop(4, 0.5))
    first = feed.first
    assert first == agents[:4]
    assert feed.ended(first[0]) == []
    assert feed.ended(first[1]) == agents[4:]
    assert feed.steps == 1
    assert feed.ended(first[2]) == []  # a straggler of the step before
    assert feed.ended(agents[4]) == []
    assert feed.ended(agents[5]) == []
    assert feed.steps == 2
    assert feed.ended(agents[6]) == []
    assert feed.steps == 2


@pytest.mark.parametrize("arm", ["vllm", "cachettl", "adaptive", "thunderagent"])
def test_rollouts_step_by_step(arm):
    load = replace(LOAD, arrivals="rollout:4:75")
    metrics = run_cell(Cell(parse_arms(arm)[0], ENGINE, load)).metrics
    assert metrics["num_programs"] == 12
    assert metrics["rollout_steps"] == 3
    minutes = metrics["makespan_s"] / 60.0
    assert metrics["rollout_steps_per_min"] == pytest.approx(3 / minutes)


def test_new_weights_make_all_kv_worthless(monkeypatch):
    """What stragglers had in the cache is prefilled again."""
    load = replace(LOAD, arrivals="rollout:6:20")
    rollouts = Cell(parse_arms("adaptive")[0], ENGINE, load)
    emptied = run_cell(rollouts).metrics
    monkeypatch.setattr(Simulation, "_update_weights", lambda self: None)
    kept = run_cell(rollouts).metrics
    assert emptied["rollout_steps"] == kept["rollout_steps"]
    assert kept["prefill_s"] < emptied["prefill_s"]
    # Preempted, and pins of programs between turns dropped.
    assert emptied["num_programs"] == 12
    assert emptied["preemptions"] > kept["preemptions"]
    assert emptied["connector"]["pins.reset"] > 0
