"""Profiles of step times: fitted, written, read, simulated, and what they predict."""

from __future__ import annotations

import json
import random

import pytest

pytest.importorskip("vllm")

from bench.compare import validate
from bench.compare.step_fit import LoggedStep, fit, fit_request_time, read_steps
from bench.compare.validate import Compared, Runs, ValidateOptions
from bench.sim.options import SimOptions, cells_of
from bench.sim.rivals.arms import parse_arms
from bench.sim.run import _file_hash, cell_key
from bench.sim.settings import EngineSetting
from ttlcache_sim.steps.profile import MAX_STEP_ERROR, Profile, load_profile

TRUE = Profile(0.01, 2e-4, 3e-8, 1e-7)


def steps_of(profile: Profile, noise: float, stalls: int = 0) -> list[LoggedStep]:
    """Decodes of some contexts, with a chunk of a prompt in every third."""
    rng = random.Random(0)
    steps = []
    for number in range(400):
        batch = [(1, rng.randrange(100, 9000)) for _ in range(rng.randrange(9))]
        if number % 3 == 0 or not batch:
            new = rng.randrange(16, 2048)
            batch.append((new, new + rng.randrange(4000)))
        seconds = profile.seconds(batch) * rng.uniform(1 - noise, 1 + noise)
        batch = [(str(n), *sizes) for n, sizes in enumerate(batch)]
        steps.append(LoggedStep(batch, seconds * (30.0 if number < stalls else 1.0)))
    return steps


def test_a_profile_is_found_again_in_steps_that_it_made():
    found = fit(steps_of(TRUE, noise=0.0))
    for name in ("step_base_s", "token_s", "pair_s", "kv_s"):
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=1e-3)
    assert found.held_out_error < 1e-3


def test_the_sum_of_all_steps_is_what_they_took_and_stalls_bend_nothing():
    steps = steps_of(TRUE, noise=0.2)
    found, stalled = fit(steps), fit(steps_of(TRUE, noise=0.2, stalls=4))
    for each in (found, stalled):
        told = sum(each.of_sums(*step.row[1:]) for step in steps)
        assert told == pytest.approx(sum(step.seconds for step in steps), rel=0.03)
        assert 0.02 < each.held_out_error < 0.3
    assert all(error > 0.0 for error in found.errors[:2])


def test_no_model_errs_less_than_steps_that_are_alike() -> None:
    rng = random.Random(1)
    steps = [
        LoggedStep([("a", 1, 100 + n)], 0.01 * rng.uniform(0.6, 1.4))
        for n in range(400)
    ]
    found = fit(steps)
    assert 0.12 < found.like_step_error < 0.3
    assert found.held_out_error <= found.max_held_out_error
    assert fit(steps_of(TRUE, noise=0.0)).max_held_out_error == MAX_STEP_ERROR


def test_a_step_lasts_from_the_end_of_the_one_before(tmp_path):
    path = tmp_path / "steps.jsonl"
    rows = [
        (1.0, 2.0, [["a", 5, 5]]),
        (2.5, 3.0, [["a", 1, 6]]),  # what lay between was the engine's own work
        (9.0, 9.5, [["b", 1, 9]]),  # the engine was idle before
        (9.2, 9.9, [["c", 1, 9]]),  # scheduled while the last one ran
        (9.3, 9.91, [["d", 7, 7]]),  # it, too: for so long it was launched
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    steps = read_steps(path)
    assert [step.seconds for step in steps] == pytest.approx([1.0, 1.0, 0.5, 0.41])
    assert [step.row for step in (steps[0], steps[3])] == [
        (1, 5, 12.5, 5),
        (2, 8, 33, 16),
    ]


def test_what_requests_take_beside_their_steps():
    steps = [LoggedStep([(str(n // 2), 1, 9)], 0.5) for n in range(40)]
    turns = [(100 * n, 1.0 + 0.02 + 1e-5 * 100 * n) for n in range(20)]
    base_s, token_s = fit_request_time(steps, turns)
    assert base_s == pytest.approx(0.02, rel=1e-3)
    assert token_s == pytest.approx(1e-5, rel=1e-3)
    with pytest.raises(ValueError, match="steps of 20 requests, 19 turns"):
        fit_request_time(steps, turns[1:])


def test_a_file_gives_back_the_profile_and_the_simulator_takes_it(tmp_path):
    path = tmp_path / "profile.json"
    TRUE.write(path)
    assert load_profile(path) == TRUE
    cells = cells_of(SimOptions(engine=EngineSetting(profile=path)))
    assert cells[0].engine.step_time == TRUE
    keys = {cell_key(cells[0])}
    Profile(1.0, 1.0, 0.0, 0.0).write(path)
    _file_hash.cache_clear()
    assert cell_key(cells[0]) not in keys  # another profile, other results
    with pytest.raises(ValueError, match="bench profile makes one"):
        load_profile(tmp_path / "other.json")


# --- bench validate ----------------------------------------------------------

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
def test_a_prediction_holds_near_the_mean_or_between_the_runs(
    predicted_s, measured_s, holds
):
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
