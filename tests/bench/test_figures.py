"""docs/bench.md is what the renderer gives; the figures are drawn from it."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bench.cli import app
from bench.report.figures import fleets
from bench.report.figures.cli import ROOT, load_results
from bench.report.figures.page import losses, render
from bench.report.figures.summary import BEGIN, END, render_summary, write_into
from bench.report.figures.sweeps import SWEEPS, ablation_arms
from bench.sim.rivals.ablations import ABLATIONS
from bench.sim.rivals.arms import parse_arms
from tests.bench.samples import grid_row

COMMITTED = load_results()


def test_the_page_is_what_the_renderer_gives():
    assert (ROOT / "docs" / "bench.md").read_text() == render(COMMITTED)


def test_every_number_has_its_command():
    page = render(COMMITTED)
    for result in COMMITTED.values():
        command = (
            result["setting"]["command"] if "setting" in result else result["command"]
        )
        assert f"`{command}`" in page


def test_losses_are_told():
    rows = [
        {"x": "1", "arm": "vllm", "mean_jct_s": 100.0},
        {"x": "1", "arm": "adaptive", "mean_jct_s": 110.0},
        {"x": "1", "arm": "oracle", "mean_jct_s": 50.0},
        {"x": "2", "arm": "vllm", "mean_jct_s": 100.0},
        {"x": "2", "arm": "adaptive", "mean_jct_s": 100.5},
    ]
    assert losses({"rows": rows}) == ["1: vllm by 10.0 %"]


def test_fleets_are_held_against_their_bars():
    def row(x, arm, jct_s, per_s=1.0):
        return {"x": x, "arm": arm, "mean_jct_s": jct_s, "programs_per_s": per_s}

    rows = [
        row("1", "adaptive", 9.0, 0.9),
        row("1", "adaptive", 9.0, 1.1),
        row("64", "adaptive @ session", 12.0, 62.0),
        row("64", "adaptive @ sticky", 8.0),
        row("64", "adaptive @ cache-aware", 10.0),
    ]
    (text,) = fleets.notes("fleet-full", {"rows": rows})
    assert "one replica's: 0.969" in text
    assert "`session` 1.20, `sticky` 0.80 (bar: 1)" in text
    # What was not run is not told.
    (text,) = fleets.notes("fleet-full", {"rows": rows[2:]})
    assert "one replica" not in text


def test_rollouts_are_held_against_their_bars():
    turns = {"vllm": 10.0, "cachettl": 20.0, "thunderagent": 40.0, "adaptive": 30.0}
    rows = [{"x": "64", "arm": a, "turns_per_min": n} for a, n in turns.items()]
    (text,) = fleets.notes("rollout", {"rows": rows})
    assert "3.00x `vllm`, 1.50x `cachettl`, 0.75x `thunderagent`" in text


def test_every_sweep_has_cells_and_the_ablation_names_every_idea():
    for sweep in SWEEPS.values():
        assert sweep.cells()
    names = [arm.name for arm in parse_arms(ablation_arms())]
    assert names[:5] == ["vllm", "program-fcfs", "static-ttl", "cachettl", "adaptive"]
    assert {f"adaptive:{name}" for name in ABLATIONS} < set(names)
    assert 'adaptive:{"admission": "none"}' in names


def test_the_command_renders_page_and_pictures_and_refuses(tmp_path):
    readme = Path(ROOT) / "README.md"
    copy = tmp_path / "README.md"
    copy.write_text(readme.read_text())
    to = ["--docs", str(tmp_path), "--readme", str(copy)]
    result = CliRunner().invoke(app, ["figures", *to])
    assert result.exit_code == 0, result.output
    page = (tmp_path / "bench.md").read_text()
    assert page == (Path(ROOT) / "docs" / "bench.md").read_text()
    assert copy.read_text() == readme.read_text()
    drawn, committed = tmp_path / "bench", ROOT / "docs" / "bench"
    assert {path.name for path in drawn.iterdir()} == {
        path.name for path in committed.iterdir()
    }
    assert all(path.stat().st_size for path in drawn.iterdir())
    result = CliRunner().invoke(app, ["figures", "--measure", "nothing"])
    assert result.exit_code == 1


def test_pages_have_the_grids_numbers():
    setting = {"half": "even", "programs": 150, "vllm": "1", "command": "bench grid"}
    rows = [
        grid_row(0.6, cachettl=1.0, vllm=1.0, adaptive=1.0, oracle=0.9),
        grid_row(1.1, cachettl=1.0, vllm=4.0, adaptive=0.25, oracle=0.2),
    ]
    rows[0]["caveat"] = "9 of 10 programs are cut"
    grid = {"setting": setting, "rows": rows}
    text = render_summary({"grid": grid})
    assert "| `adaptive` | 1.000 | 0.250 | 0.500 (0.500-0.500) |" in text
    assert "| with headroom | 2 | 0.500 (0.500-0.500) | 0.500 | 1.000 w small" in text
    page = render({"grid": grid})
    assert "w: 9 of 10 programs are cut." in page
    assert "| w small 1.1 | 0.1 | 100 cachettl | 1.00 | 4.00 | 0.25 | 0.20 |" in page


def test_readme_has_the_results_of_the_loads():
    text = render_summary(COMMITTED)
    assert "## Results" in text
    assert "| `adaptive` | " in text
    swe = [r for r in COMMITTED["load-swe"]["rows"] if r["x"] == "0.05"]
    ours_s, plain_s = (
        statistics.fmean(row["mean_jct_s"] for row in swe if row["arm"] == arm)
        for arm in ("adaptive", "vllm")
    )
    assert f" {ours_s / plain_s:.2f} " in text
    assert text in (Path(ROOT) / "README.md").read_text()
    assert render_summary({}) == ""


def test_figures_of_different_versions_may_have_different_arms():
    def sweep(**jct):
        rows = [{"x": "1", "arm": a, "mean_jct_s": v} for a, v in jct.items()]
        return {"rows": rows}

    text = render_summary(
        {
            "load-swe": sweep(vllm=2.0, adaptive=1.0, infercept=1.5),
            "load-bfcl": sweep(vllm=2.0, adaptive=1.0, cachettl=1.2),
        }
    )
    assert "| `infercept` | 0.75 |  |" in text
    assert "| `cachettl` |  | 0.60 |" in text


def test_the_summary_goes_between_its_markers(tmp_path):
    page = tmp_path / "README.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    write_into(page, "new")
    assert page.read_text() == f"before\n{BEGIN}\nnew\n{END}\nafter\n"
    page.write_text("no place")
    with pytest.raises(ValueError, match="expected"):
        write_into(page, "new")
