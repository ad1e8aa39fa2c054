"""The grid: which cells, which verdict, the same bytes again."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from bench.cli import app
from bench.report import grid, grid_bars, grid_spec
from bench.report.grid_spec import GridOptions, places, points, probes, saturation

SYNTHETIC = GridOptions(workloads=("swe", "bfcl"), arms="vllm,cachettl")


def _row(load: str = "one", **mean: float) -> dict:
    arms = {
        arm: {"mean_jct_s": [jct_s, jct_s], "p99_jct_s": [2 * jct_s, 2 * jct_s]}
        for arm, jct_s in mean.items()
    }
    return {"workload": "w", "pool": "small", "load": load, "arms": arms}


def _bars(rows: list[dict]) -> list[grid_bars.Bar]:
    return grid_bars.bars(rows)


def test_bars_by_hand():
    rows = [
        _row("half", vllm=100.0, cachettl=100.0, adaptive=100.0, oracle=100.0),
        _row("two", vllm=400.0, cachettl=200.0, adaptive=98.0, oracle=80.0),
    ]
    geomean, worst, half, p99, regret = _bars(rows)
    assert geomean.reached == pytest.approx(math.sqrt(0.49))
    assert worst.reached == 1.0
    assert half.reached == 1.0
    assert half.where == "w small half"
    assert p99.reached == 1.0
    assert regret.reached == pytest.approx((18 / 80) / (120 / 80))
    assert [bar.verdict for bar in _bars(rows)] == ["pass"] * 5


def test_a_lost_cell_is_named_and_variants_are_no_rivals():
    rows = [_row(vllm=100.0, cachettl=100.0, adaptive=50.0, oracle=1.0)]
    rows[0]["arms"]['adaptive:{"x": 1}'] = {"mean_jct_s": [9.0], "p99_jct_s": [9.0]}
    rows += [_row("two", vllm=100.0, cachettl=90.0, adaptive=99.0, oracle=1.0)]
    worst = _bars(rows)[1]
    assert worst.reached == pytest.approx(1.1)
    assert (worst.where, worst.verdict) == ("w small two", "FAIL")


def test_what_was_not_run_is_not_passed():
    verdicts = {bar.verdict for bar in _bars([_row(vllm=1.0)])}
    assert verdicts == {"not measured"}


def test_loads_are_multiples_of_the_saturation_and_seeds_follow_the_half():
    where = places(replace(SYNTHETIC, pools=("small",)))
    found = points(SYNTHETIC, where, [0.1, 0.02])
    assert [point.rate for point in found] == [0.05, 0.1, 0.2, 0.01, 0.02, 0.04]
    seeds = [cell.workload.seed for cell in found[0].cells["vllm"]]
    assert seeds == [0, 1]
    assert replace(SYNTHETIC, half="odd").seed_list() == [100, 101]


def test_pools_are_counted_in_contexts():
    small, large, offload = places(replace(SYNTHETIC, workloads=("swe",)))
    assert large.engine.blocks == pytest.approx(3 * small.engine.blocks, rel=0.01)
    assert offload.engine.blocks == small.engine.blocks
    assert offload.engine.offload.startswith("cpu:")
    closed = probes(offload)
    assert [cell.workload.arrivals for cell in closed.values()] == [
        "closed:4",
        "closed:6",
        "closed:8",
    ]
    assert {cell.engine.offload for cell in closed.values()} == {"none"}


def test_saturation_is_the_peak_and_not_what_is_left_under_thrashing():
    # Little's law: 4 / 100 s, 6 / 120 s, 8 / 800 s.
    assert saturation({4: 100.0, 6: 120.0, 8: 800.0}) == pytest.approx(0.05)


def test_a_missing_trace_is_named():
    with pytest.raises(ValueError, match="--traces"):
        places(GridOptions(traces=Path("nowhere"), workloads=("weka_claude_code",)))


@pytest.mark.parametrize(
    "change",
    [{"workloads": ("x",)}, {"pools": ("x",)}, {"loads": ("x",)}, {"half": "x"}],
)
def test_nonsense_is_refused(change):
    with pytest.raises(ValueError, match="expected one of"):
        places(replace(SYNTHETIC, **change))


def test_a_grid_of_one_cell_twice(tmp_path, monkeypatch):
    pytest.importorskip("vllm")
    monkeypatch.chdir(tmp_path)
    # One short closed loop shows a saturation, too.
    monkeypatch.setattr(grid_spec, "CROWDS", (1.0,))
    monkeypatch.setattr(grid_spec, "PROBE_PROGRAMS", 4)
    arguments = ["grid", "--workloads", "swe", "--pools", "small", "--loads", "two"]
    arguments += ["--arms", "vllm,cachettl", "--programs", "0.08", "--seeds", "3"]
    for name in ("a", "b"):
        out = ["--out", str(tmp_path / f"{name}.json"), "--processes", "1"]
        result = CliRunner().invoke(app, [*arguments, *out])
        assert result.exit_code == 0, result.output
        assert "not measured" in result.output
    first = (tmp_path / "a.json").read_bytes()
    assert first == (tmp_path / "b.json").read_bytes()
    stored = json.loads(first)
    assert list(stored["rows"][0]["arms"]) == ["vllm", "cachettl"]
    assert "--programs 0.08" in stored["setting"]["command"]
    assert len(list(Path("out/cache/sim").glob("*.json"))) == 3  # with the probes


def test_the_command_line_refuses_nonsense():
    result = CliRunner().invoke(app, ["grid", "--pools", "huge"])
    assert result.exit_code == 1
    assert "expected one of" in result.output


def test_the_command_repeats_the_options():
    text = grid.command(replace(SYNTHETIC, seeds=(7,), programs=0.5))
    assert "--workloads swe,bfcl" in text
    assert "--arms 'vllm,cachettl' --half even --seeds 7 --programs 0.5" in text


def test_many_seeds_tell_how_much_is_chance():
    row = _row(adaptive=1.0, vllm=2.0)
    row["arms"] = {
        "vllm": {"mean_jct_s": [100.0] * 4, "p99_jct_s": [300.0] * 4},
        "adaptive": {
            "mean_jct_s": [25.0, 100.0, 200.0, 800.0],
            "p99_jct_s": [75.0, 300.0, 150.0, 150.0],
        },
    }
    ratio = grid_bars.ratio_of(row, "vllm")
    assert ratio.geometric_mean == pytest.approx(math.sqrt(2.0))
    # Logarithms of 1/4, 1, 2 and 8: deviation ln 2 * sqrt(13/3), over the root of 4.
    error = math.log(2.0) * math.sqrt(13.0 / 3.0) / 2.0
    assert ratio.standard_error == pytest.approx(error)
    console = Console(width=200, file=io.StringIO())
    console.print(grid.seeds_table([row]))
    lines = console.file.getvalue().splitlines()
    (told,) = (line.split() for line in lines if "vllm" in line)
    # A share of the ratio, so times it; p99: 1/4, 1, 1/2 and 1/2.
    told_error = f"{math.sqrt(2.0) * error:.3f}"
    jct, p99 = ["1.414", "±", told_error], ["0.500", "±", "0.141"]
    assert told == ["w", "small", "one", "vllm", *jct, "0.500", *p99]
    twice = {**row, "arms": {**row["arms"], "vllm": row["arms"]["adaptive"]}}
    console = Console(width=200, file=io.StringIO())
    console.print(grid.loads_table([row, twice]))
    lines = console.file.getvalue().splitlines()
    (told,) = (line.split() for line in lines if "mean_jct_s" in line)
    # Of the square root of 2 in one cell, and 1 in the other.
    assert told == ["vllm", "mean_jct_s", f"{2.0**0.25:.3f}", "(1.414)"]
