"""Tiny cells through vLLM's own scheduler: conservation, determinism, order."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("vllm")


from bench.sim.rivals.arms import ARMS, Arm, parse_arms
from bench.sim.settings import Cell, EngineSetting
from ttlcache_sim import cell as cell_module
from ttlcache_sim.cell import run_cell
from ttlcache_sim.checks import SimulationError
from ttlcache_sim.gates import Gate
from ttlcache_sim.load.workload import WorkloadSpec
from ttlcache_sim.strides import stride as stride_module

ENGINE = EngineSetting(blocks=2_000, max_num_batched_tokens=1024)
LOAD = WorkloadSpec(
    "swe", programs=4, rate=1.0, seed=1, max_context=ENGINE.max_context // 4
)


def _run(arm: str, engine: EngineSetting = ENGINE, load: WorkloadSpec = LOAD):
    return run_cell(Cell(parse_arms(arm)[0], engine, load)).metrics


@pytest.mark.parametrize("arm", ["vllm", "cachettl", "adaptive", "oracle"])
def test_every_kind_of_arm_above_two_tiers(arm):
    """One tier: see the goldens. A conservation law that is broken raises."""
    metrics = _run(arm, replace(ENGINE, offload="cpu:1+ssd:20"))
    assert metrics["num_programs"] == 4


def test_tiers_spare_prefill():
    without = _run("vllm", PRESSED)
    tiered = _run("vllm", replace(PRESSED, offload="cpu:50"))
    assert tiered["reload_tokens"] > 0
    assert tiered["prefill_s"] < without["prefill_s"]
    assert tiered["prompt_hit"] > without["prompt_hit"]


def test_prompts_without_outputs_hit_less_and_are_claimed_all_the_same():
    whole, cut = (_run("adaptive", replace(ENGINE, repeat_output=r)) for r in (1, 0))
    assert 0.0 < cut["prompt_hit"] < whole["prompt_hit"]
    claimed = [each["connector"]["pins.claimed"] for each in (cut, whole)]
    assert claimed[0] > 0.9 * claimed[1]


NIGHTLY = pytest.mark.nightly
PRESSED = replace(ENGINE, blocks=1_000)
CROWD = replace(LOAD, programs=8, rate=2.0)


#: A stride teaches the seconds of a decode step once, its steps teach them one by one;
#: these arms ask for so small differences of a price.
ASK_THE_PRICE = ("infercept", "ski-rental")


#: Strides are the engine's and not the policy's: one arm of each kind in every run.
EACH_KIND = ("vllm", "adaptive", "thunderagent")
STRIDE_ARMS = [
    pytest.param(arm, marks=() if arm in EACH_KIND else NIGHTLY) for arm in ARMS
]


@pytest.mark.parametrize("arm", STRIDE_ARMS)
def test_strides_change_nothing(arm):
    """To the last bit, under pressure, where waiting requests are refused."""
    fine = _run(arm, replace(PRESSED, decode_stride=1), CROWD)
    coarse = _run(arm, PRESSED, CROWD)
    for metrics in (fine, coarse):
        del metrics["connector"]  # counts how often it was asked
    if arm in ASK_THE_PRICE:
        coarse, fine = coarse["mean_jct_s"], pytest.approx(fine["mean_jct_s"], rel=1e-3)
    assert coarse == fine


@pytest.mark.parametrize(
    "arm", ["adaptive", *(pytest.param(a, marks=NIGHTLY) for a in ("vllm", "cachettl"))]
)
def test_strides_change_next_to_nothing_with_tiers(arm):
    """Far within the two percent that a coarser step may cost."""
    engine = replace(PRESSED, offload="cpu:1+ssd:20")
    fine = _run(arm, replace(engine, decode_stride=1), CROWD)
    coarse = _run(arm, engine, CROWD)["mean_jct_s"]
    assert coarse == pytest.approx(fine["mean_jct_s"], rel=1e-3)


def test_a_stride_that_vllm_schedules_otherwise_is_an_error(monkeypatch):
    monkeypatch.setattr(stride_module.Strides, "_new_blocks", lambda *args: 0)
    with pytest.raises(SimulationError, match="was planned as"):
        _run("vllm", replace(ENGINE, blocks=700), replace(CROWD, rate=9.0))


ARM_FILE = """
from bench.sim.rivals.arms import Arm
from ttlcache_sim.gates import Gate

class Slow(Gate):
    def arrive(self, agent, now_s):
        seen.append(agent.program_id)
        return [agent]

seen = []

def slow(cell, connector):
    return Slow()

ARM = Arm("mine", "a test", {"policy": "fixed", "policy_options": {"ttl_s": 9.0}},
          gate="slow")
"""


def test_an_arm_of_its_own_file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(ARM_FILE)
    metrics = _run(str(path))
    assert metrics["connector"]["pins.claimed"] > 0
    with pytest.raises(ValueError, match="no such file"):
        parse_arms(str(tmp_path / "nothing.py"))
    path.write_text("ARM = 3")
    with pytest.raises(ValueError, match="expected ARM"):
        parse_arms(str(path))


def test_an_idle_engine_serves_a_turn_in_its_own_time():
    """One program, nobody else: JCT = gaps + what the step-time model says."""
    load = replace(LOAD, programs=1)
    metrics = _run("vllm", load=load)
    assert metrics["mean_wait_s"] == 0.0
    workload = cell_module.build(load)
    gaps_s = sum(turn.gap_s for turn in workload.programs[0].turns)
    assert metrics["mean_jct_s"] == pytest.approx(metrics["busy_s"] + gaps_s)
    # vLLM keeps the prefix of an idle pool by itself, but for partial blocks.
    assert metrics["kept_gap_share"] == 1.0


def test_closed_loop_keeps_n_in_flight():
    metrics = _run("vllm", load=replace(LOAD, arrivals="closed:1"))
    assert metrics["mean_wait_s"] == 0.0
    assert metrics["makespan_s"] == pytest.approx(4 * metrics["mean_jct_s"])


def test_a_broken_law_is_named(monkeypatch):
    real = cell_module.check

    def check(workload, *engine):
        first, *rest = workload.programs
        turn = replace(first.turns[0], output_tokens=first.turns[0].output_tokens + 1)
        changed = replace(first, turns=(turn, *first.turns[1:]))
        real(replace(workload, programs=(changed, *rest)), *engine)

    monkeypatch.setattr(cell_module, "check", check)
    with pytest.raises(SimulationError, match="output tokens"):
        _run("vllm")


def test_a_wedge_is_an_error_not_a_hang(monkeypatch):
    """A gate that never lets anybody through."""

    class Shut(Gate):
        def arrive(self, agent, now_s):
            return []

    monkeypatch.setattr(Arm, "new_gate", lambda arm, cell, connector: Shut())
    with pytest.raises(SimulationError, match="no event is due"):
        _run("vllm")
