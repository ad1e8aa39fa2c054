"""docs/benchmarks.md is what the renderer gives; the figures are drawn from it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench.cli import app
from bench.report.figures import paper, servers
from bench.report.figures.cli import ROOT, load_results
from bench.report.figures.page import losses_of, render
from bench.report.figures.summary import BEGIN, END, render_summary, write_into
from bench.report.figures.sweeps import SWEEPS, ablation_arms
from bench.sim.rivals.ablations import ABLATIONS
from bench.sim.rivals.arms import parse_arms
from tests.commands import output_of

COMMITTED = load_results()
PAGE = ROOT / "docs" / "benchmarks.md"


def sweep(key: str = "mean_jct_s", **by_arm: list[float]) -> dict:
    """Points 1, 2, … of each arm, as a measured sweep."""
    rows = [
        {"x": str(x), "arm": arm, key: value}
        for arm, values in by_arm.items()
        for x, value in enumerate(values, start=1)
    ]
    return {"rows": rows, "x": "point", "drawn": (key, key)}


def test_the_summary_is_short():
    assert len(render_summary(COMMITTED).split()) <= 250
    assert render_summary({}) == ""


def test_every_number_has_its_command_and_every_picture_is_linked():
    page = render(COMMITTED)
    for name, result in COMMITTED.items():
        if name in {*SWEEPS, "overhead"}:
            assert f"](bench/{name}.png)" in page
            continue
        command = result.get("setting", result)["command"]
        assert f"`{command}`" in page


def test_results_are_of_the_sweeps_as_they_are():
    for name in COMMITTED.keys() & SWEEPS.keys():
        if SWEEPS[name].points:
            found = dict.fromkeys(row["x"] for row in COMMITTED[name]["rows"])
            assert list(found) == list(SWEEPS[name].points), f"--measure {name}"


def row_of(name: str, results: dict) -> list[str]:
    (line,) = (r for r in paper.section(results).splitlines() if f"{name}" in r)
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_figure_of_the_paper_is_held_against_ours():
    point = [1550.0, 2000.0]
    slow = sweep(vllm=point, cachettl=[400.0, 800.0], adaptive=[300.0, 310.0])
    first, claim, ours, verdict = row_of("Fig. 14", {"turns": slow})
    assert first == "[Fig. 14](bench/turns.png), §6.3"
    assert claim.startswith("turns times 5")
    assert ours == "JCT grows: `vllm` 1.29x, `cachettl` 2.00x, `adaptive` 1.03x"
    assert verdict == "Differs: `cachettl` grows 2.00x."
    alike = sweep(vllm=point, cachettl=[400.0, 410.0], adaptive=[300.0, 310.0])
    assert row_of("Fig. 14", {"turns": alike})[3] == "Agrees: as there."
    assert "not measured here | `--measure turns` was not run." in paper.section({})
    assert "not measured here | no H100s, SGLang or Dynamo." in paper.section({})


def test_rivals_that_are_ahead_are_named():
    arms = {"vllm": [9.0, 9.0], "autellix": [8.0, 2.0], "infercept": [7.0, 7.0]}
    result = sweep(**arms, cachettl=[3.0, 4.0], adaptive=[3.0, 3.0])
    *_, ours, verdict = row_of("Fig. 15", {"ssd": result})
    assert ours == "mean `cachettl` 2.25x to 3.00x, `adaptive` 3.00x"
    assert verdict == "Differs: behind in 1 of 6, most 0.50x `autellix` at 2."


def test_points_where_ours_loses_or_gains_nothing_are_counted():
    result = sweep(vllm=[9.0, 9.0, 9.0], cachettl=[2.0, 9.0, 9.0], adaptive=[3, 9, 9])
    behind, ties = losses_of({"ssd": result})
    assert behind.endswith("1; the worst: ssd at 1: `cachettl` by 50.0 %")
    assert ties == "Points within 1 % of plain vLLM: ssd 2 of 3"


def test_every_figure_that_the_paper_has_is_in_the_table():
    table = paper.section(COMMITTED)
    for number in (3, 4, *range(8, 17)):
        assert re.search(rf"\| \[?Fig. {number}\b", table), number
    for name in ("Table 4", "Table 5", "v1 Fig. 11", "Routing"):
        assert name in table


def test_what_got_worse_on_real_servers_is_named():
    rows = [
        ["metrics.mean_ms", "100", "50", "0.500 ± 0.010"],
        ["metrics.p99_ms", "6.395e+04", "102,200", "1.598 ± 0.100"],
        ["metrics.reuse", "0.5", "0.25", "0.500 ± 0.000"],
        ["failed", "0", "3", ""],
    ]
    jct_s = {"vanilla": 400, "ttlcache": 100, "lmcache": 120, "ttlcache+cpu": 150}
    alike = {"p99_turn_s": 9.0, "prompt_hit": 0.5}
    rounds = [{arm: {"mean_jct_s": each, **alike} for arm, each in jct_s.items()}]
    runs = {"vllm": [4, 4], "adaptive": [3, 1]}
    cells = [
        {
            "name": f"{a} at 1/s",
            "measured": [{"mean_jct_s": s, "p99_turn_s": 4} for s in r],
        }
        for a, r in runs.items()
    ]
    cells[1]["measured"][0]["p99_turn_s"] = 6
    assert servers.jct_by_load({"cells": cells})["1/s"]["adaptive"] == [1, 3]
    results = {"harness-a": {"rows": rows}, "demo": {"rounds": rounds}}
    results["validate"] = {"cells": cells}
    assert servers.losses(results) == [
        "a: `p99_ms` 1.598±0.100x, `reuse` 0.500±0.000x, `failed` 0 to 3",
        "demo: mean JCT, s `ttlcache+cpu` 150, `lmcache` 120",
        "validate: turn p99 1.25x `vllm` at 1/s",
    ]


def test_every_sweep_has_numbers_and_the_ablation_names_every_idea():
    for each in SWEEPS.values():
        assert each.made or each.cells()
        assert bool(each.roofline) == bool(each.points)
    names = [arm.name for arm in parse_arms(ablation_arms())]
    assert names[:5] == ["vllm", "program-fcfs", "static-ttl", "cachettl", "adaptive"]
    assert {f"adaptive:{name}" for name in ABLATIONS} < set(names)
    assert 'adaptive:{"admission": "none"}' in names


def test_the_command_renders_page_and_pictures_and_refuses(tmp_path):
    readme = Path(ROOT) / "README.md"
    copy = tmp_path / "README.md"
    copy.write_text(readme.read_text())
    to = ["--docs", str(tmp_path), "--readme", str(copy)]
    output_of(app, "figures", *to)
    assert (tmp_path / "benchmarks.md").read_text() == PAGE.read_text()
    assert copy.read_text() == readme.read_text()
    drawn, committed = tmp_path / "bench", ROOT / "docs" / "bench"
    assert {path.name for path in drawn.iterdir()} == {
        path.name for path in committed.iterdir()
    }
    assert all(path.stat().st_size for path in drawn.iterdir())
    output_of(app, "figures", "--measure", "nothing", status=1)


def test_what_is_drawn_needs_no_simulator(tmp_path):
    to = ["--docs", str(tmp_path), "--results", str(tmp_path / "results")]
    copy = tmp_path / "README.md"
    copy.write_text(f"{BEGIN}\n{END}\n")
    output_of(app, "figures", "--measure", "workload", *to, "--readme", copy)
    (row,) = (
        r for r in (tmp_path / "benchmarks.md").read_text().split("\n") if "[Fig" in r
    )
    assert "Agrees: all fall." in row
    assert (tmp_path / "bench" / "workload.png").stat().st_size


def test_the_summary_goes_between_its_markers(tmp_path):
    page = tmp_path / "README.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    write_into(page, "new")
    assert page.read_text() == f"before\n{BEGIN}\nnew\n{END}\nafter\n"
    page.write_text("no place")
    with pytest.raises(ValueError, match="expected"):
        write_into(page, "new")


def test_results_name_no_path_of_one_machine():
    harnesses = [each for name, each in COMMITTED.items() if name.startswith("harness")]
    assert harnesses
    for result in harnesses:
        commands = [run["command"] for one in result["rounds"] for run in one.values()]
        parts = [part for command in commands for part in command]
        assert not [p for p in (*parts, result["options"]["out"]) if p[:1] == "/"]
