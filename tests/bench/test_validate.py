"""What counts as predicted, which runs count, without a server."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

pytest.importorskip("vllm")

from bench.compare import validate
from bench.compare.validate import Compared, Runs, ValidateOptions
from bench.sim.profile import Profile
from bench.sim.rivals.arms import parse_arms

RUN = {"mean_jct_s": 100.0, "prompt_hit": 0.5, "wait_share": 0.01}


def compared(predicted_s: float, *measured_s: float, name: str = "vllm at 1/s"):
    runs = [{**RUN, "mean_jct_s": seconds} for seconds in measured_s]
    return Compared(name, {"mean_jct_s": predicted_s, "prompt_hit": 0.5}, runs)


@pytest.mark.parametrize(
    ("predicted_s", "measured_s", "holds"),
    [
        (109.0, (100.0, 100.0), True),  # within a tenth of the mean
        (111.0, (100.0, 100.0), False),
        (139.0, (60.0, 140.0), True),  # between the runs
        (141.0, (60.0, 140.0), False),
    ],
)
def test_a_prediction_holds_near_the_mean_or_between_the_runs(predicted_s, measured_s, holds):
    assert compared(predicted_s, *measured_s).holds("mean_jct_s") is holds


def test_runs_that_waited_for_a_core_do_not_count_and_are_kept(tmp_path):
    runs = Runs(tmp_path / "runs.json", {"seed": 1})
    runs.add("cell", RUN)
    runs.add("cell", {**RUN, "wait_share": 0.06})
    again = Runs(tmp_path / "runs.json", {"seed": 1})
    assert again.counted("cell") == [RUN]
    assert again.discarded == 1
    assert Runs(tmp_path / "runs.json", {"seed": 2}).counted("cell") == []


def test_arms_must_stand_in_the_same_order():
    options = ValidateOptions(rates=(1.0,), arms="vllm,adaptive")
    arms = parse_arms(options.arms)
    cells = [compared(90.0, 100.0), compared(80.0, 110.0, name="adaptive at 1/s")]
    (check,) = validate.orders(options, arms, cells)
    assert not check.ok
    assert (check.found, check.allowed) == ("adaptive < vllm", "vllm < adaptive")


def test_virtual_time_serves_the_same_programs_with_the_measured_steps(tmp_path):
    def jct_s(factor: float) -> float:
        path = tmp_path / f"{factor}.json"
        Profile(0.01 * factor, 2e-4 * factor, 1e-8, 1e-8, 0.01).write(path)
        options = ValidateOptions(programs=4, token_scale=0.02, profile=path)
        (arm,) = parse_arms("vllm")
        found = validate.predict(options, arm, rate=1.0)
        assert found["num_programs"] == 4
        return float(found["mean_jct_s"])

    assert 1.3 * jct_s(1.0) < jct_s(3.0)


@pytest.mark.parametrize(
    "arm", ["cachettl-strict", "thunderagent", "oracle", "infercept"]
)
def test_what_only_the_simulator_has_is_refused(arm, tmp_path):
    options = ValidateOptions(arms=f"vllm,{arm}", out=tmp_path)
    with pytest.raises(ValueError, match=f"{arm!r}: only the simulator has it"):
        validate.validate(options, Console())


def test_a_cell_without_runs_that_count_fails():
    checks = validate._checks([compared(100.0)], rounds=1)
    assert [check.ok for check in checks] == [False]
