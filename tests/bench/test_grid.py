"""The grid: which cells, how well they are known, which verdict, the same bytes."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest

from bench.cli import app
from bench.ratios import geometric_mean
from bench.report import grid, grid_spec, grid_verdict
from bench.report.grid_spec import GridOptions, capacity_runs, places, points
from bench.sim.rivals.arms import ARMS
from tests.bench.samples import grid_row
from tests.commands import output_of
from ttlcache_sim.bootstrap import BLOCK_PROGRAMS, Interval, paired_bootstrap
from ttlcache_sim.settings import CellResult

SYNTHETIC = GridOptions(workloads=("swe", "bfcl"), arms="vllm,cachettl")


def test_the_verdict_by_hand():
    rows = [
        grid_row(0.6, cachettl=1.0, vllm=1.0, adaptive=1.0, oracle=0.98),
        grid_row(1.1, cachettl=1.0, vllm=4.0, adaptive=0.81, oracle=0.5),
        grid_row(0.95, cachettl=1.2, vllm=1.0, adaptive=1.1, oracle=0.5),
    ]
    header, body = grid_verdict.verdict(rows)
    found = {line[0]: dict(zip(header, line, strict=True)) for line in body}
    assert {name: line["number"] for name, line in found.items()} == {
        "with headroom": "2",
        "without": "1",
        "all": "3",
    }
    told = found["with headroom"]
    mean = math.sqrt(0.81 * 1.1)
    assert told["adaptive / base"].startswith(f"{mean:.3f} (")
    # Against vLLM in the cell where it is the best rival.
    assert told["worst cell"] == "1.100 w small 0.95"
    assert (told["ahead"], told["behind"]) == ("1", "1")
    assert (found["without"]["ahead"], found["without"]["behind"]) == ("0", "0")
    # Without the reference nobody knows where there is headroom; without us, nothing.
    less = [{**row, "arms": dict(row["arms"])} for row in rows]
    for row in less:
        del row["arms"]["oracle"]
    assert [line[0] for line in grid_verdict.verdict(less)[1]] == ["all"]
    assert grid_verdict.verdict([grid_row(vllm=1.0)])[1] == []


def test_what_is_not_known_within_two_percent_is_marked():
    row = grid_row(cachettl=1.0, adaptive=0.9)
    row["arms"]["adaptive"]["over_base"] = [0.9, 0.85, 0.95]
    assert grid_verdict.cells([row])[1][0][-2:] == ["1.00", "0.90~"]
    assert not grid_verdict.is_settled(Interval(0.9, 0.85, 0.95))
    assert grid_verdict.is_settled(Interval(3.0, 2.0, 4.0))
    assert grid_verdict.is_settled(Interval(0.9, 0.89, 0.91))


def test_what_both_share_is_no_chance_and_a_wave_is_one_observation():
    """How often an interval has the true ratio: test_estimate.py."""
    rng = random.Random(0)
    base = [[rng.lognormvariate(0, 1) for _ in range(150)] for _ in range(2)]
    halved = [[x / 2 for x in own] for own in base]
    exact = paired_bootstrap(halved, base)
    assert (exact.low, exact.high) == pytest.approx((0.5, 0.5))
    # Programs that waited together are one observation, not many.
    waves = [10.0 if n // BLOCK_PROGRAMS % 2 else 1.0 for n in range(150)]
    mixed = random.Random(1).sample(waves, len(waves))
    ones = [[1.0] * 150]
    wide, narrow = (paired_bootstrap([x], ones).half_width for x in (waves, mixed))
    assert wide > 2 * narrow


def test_intervals_of_cells_add_up_to_that_of_their_mean():
    pair = [Interval(0.5, 0.5 / 1.1, 0.5 * 1.1), Interval(2.0, 2.0 / 1.1, 2.0 * 1.1)]
    mean = geometric_mean(pair)
    assert mean.ratio == pytest.approx(1.0)
    assert mean.high == pytest.approx(1.1)  # loads of one workload err together
    assert math.isnan(geometric_mean([]).ratio)


def _runs(**jct_s: list[list[float]]) -> grid.Runs:
    return {
        arm.replace("_", "-"): [CellResult({}, {}, {"jct_s": own}) for own in seeds]
        for arm, seeds in jct_s.items()
    }


def test_only_arms_that_are_not_known_well_get_another_seed():
    rng = random.Random(0)
    base = [[rng.lognormvariate(0, 1) for _ in range(150)] for _ in range(2)]
    noisy = [[rng.lognormvariate(0, 1) for _ in range(150)] for _ in range(2)]
    scaled = [[[x * by for x in own] for own in base] for by in (2.0, 1.5, 0.9)]
    runs = _runs(
        vllm=scaled[0], cachettl=scaled[1], cachettl_strict=base, adaptive=scaled[2]
    )
    name, found = grid.base_and_ratios(runs)
    assert name == "cachettl-strict"
    assert found["adaptive"].ratio == pytest.approx(0.9)
    assert grid.unsettled(runs) == []
    runs |= _runs(infercept=noisy)
    readings = ["cachettl", "cachettl-strict"]
    assert grid.unsettled(runs) == [*readings, "infercept"]
    # An arm with fewer seeds is compared on those.
    runs |= _runs(cachettl_strict=[*base, base[0]], infercept=[*noisy, noisy[0]])
    runs |= _runs(cachettl=[*scaled[1], scaled[1][0]])
    assert grid.base_and_ratios(runs)[1]["adaptive"] == found["adaptive"]
    assert grid.unsettled(runs) == [*readings, "infercept"]


def test_loads_are_shares_of_the_capacity_and_seeds_follow_the_half():
    where = places(replace(SYNTHETIC, pools=("small",)))
    found = points(SYNTHETIC, where, [0.1, 0.02])
    assert [point.rate for point in found[:4]] == [0.06, 0.08, 0.095, 0.11]
    assert found[4].rate == 0.012
    arm = ARMS["vllm"]
    assert found[0].run(arm, 1).workload.seed == 1
    odd = points(replace(SYNTHETIC, half="odd"), where, [0.1, 0.02])
    assert odd[0].run(arm, 1).workload.seed == 101


def test_pools_are_counted_in_contexts_and_programs_without_warm_up_and_drain():
    pools = ("small", "large", "offload")
    small, large, offload = places(
        replace(SYNTHETIC, workloads=("swe",), pools=pools, programs=100)
    )
    assert large.engine.blocks == pytest.approx(3 * small.engine.blocks, rel=0.01)
    assert offload.engine.blocks == small.engine.blocks
    assert offload.engine.offload.startswith("cpu:")
    spec = small.spec
    assert spec.programs - spec.warm_up - spec.drain == 100
    loops = [cell.workload for cell in capacity_runs(offload)]
    assert [spec.arrivals for spec in loops[::2]] == ["closed:16", "closed:48"]
    assert {spec.programs - spec.warm_up - spec.drain for spec in loops} == {150}
    # The last program has started before those begin that do not count.
    assert [spec.drain for spec in loops[::2]] == [16, 48]


def test_a_grid_of_one_cell_twice(tmp_path, monkeypatch):
    pytest.importorskip("vllm")
    monkeypatch.chdir(tmp_path)
    # One short closed loop shows a capacity, too.
    monkeypatch.setattr(grid_spec, "CROWDS", (1,))
    monkeypatch.setattr(grid_spec, "CAPACITY_PROGRAMS", 3)
    monkeypatch.setattr(grid_spec, "CAPACITY_ARMS", ("vllm",))
    arguments = ["grid", "--workloads", "swe", "--pools", "small", "--loads", "2.0"]
    arguments += ["--arms", "cachettl,adaptive", "--programs", "3", "--seeds", "2"]
    for name in ("a", "b"):
        out = ["--out", tmp_path / f"{name}.json", "--processes", "1"]
        assert "verdict" in output_of(app, *arguments, *out)
    first = (tmp_path / "a.json").read_bytes()
    assert first == (tmp_path / "b.json").read_bytes()
    stored = json.loads(first)
    arms = stored["rows"][0]["arms"]
    assert list(arms) == ["cachettl", "adaptive"]
    ratio, low, high = arms["cachettl"]["over_base"]
    assert ratio == 1.0
    assert math.isnan(low)  # six programs say nothing
    assert math.isnan(high)
    assert arms["adaptive"]["seeds"] == 2
    assert "--programs 3" in stored["setting"]["command"]
    assert len(list(Path("out/cache/sim").glob("*.json"))) == 5  # with the closed loop
