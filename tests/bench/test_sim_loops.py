"""Loops of arrivals: batches of rollouts, the next one when enough have ended."""

from dataclasses import replace

import pytest

pytest.importorskip("vllm")

from bench.sim.rivals.arms import parse_arms
from bench.sim.settings import Cell, EngineSetting
from ttlcache_sim.cell import run_cell
from ttlcache_sim.engine import Simulation
from ttlcache_sim.load.agents import Agent
from ttlcache_sim.load.feed import Feed, Loop, parse_loop
from ttlcache_sim.load.programs import Program, Turn
from ttlcache_sim.load.workload import WorkloadSpec

ENGINE = EngineSetting(blocks=1_000, max_num_batched_tokens=1024)
LOAD = WorkloadSpec(
    "swe", programs=12, rate=2.0, seed=1, max_context=ENGINE.max_context // 4
)


def agent(name: str) -> Agent:
    turns = (Turn(100, 10, "bash", 1.0), Turn(50, 10, "bash", 1.0))
    return Agent(0, Program(name, 0.0, turns))


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
