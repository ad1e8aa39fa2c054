"""Options, cache, JSON, command line."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from bench.cli import app
from bench.sim import run
from bench.sim.options import SimOptions, cells_of
from bench.sim.rivals.arms import ARMS, parse_arms
from bench.sim.settings import EngineSetting
from tests.commands import output_of
from ttlcache.config import load_config
from ttlcache_sim.settings import CellResult

SMALL = SimOptions(programs=10, engine=EngineSetting(blocks=8_000))


def test_arms_split_outside_braces():
    arms = parse_arms('vllm,cachettl:{"max_ttl_s": 5.0, "admission": "none"},oracle')
    assert [arm.name.partition(":")[0] for arm in arms] == [
        "vllm",
        "cachettl",
        "oracle",
    ]
    extra = arms[1].extra_config(1.0)
    assert extra["policy"] == "cachettl"
    assert extra["max_ttl_s"] == 5.0


def test_static_ttl_is_the_cold_start_of_the_mean_context():
    extra = ARMS["static-ttl"].extra_config(math.e)
    assert extra["policy_options"]["ttl_s"] == pytest.approx(1.0)


@pytest.mark.parametrize("name", ["cachettl", "adaptive", "ski-rental", "program-fcfs"])
def test_our_arms_run_with_the_defaults(name):
    extra = ARMS[name].extra_config(1.0)
    assert not {"max_queue_wait_s", "quantum_turns"} & set(extra)
    load_config(extra)


def test_cells_are_arms_times_seeds():
    cells = cells_of(SimOptions(arms="vllm,cachettl", seeds=(0, 7)))
    assert [(c.arm.name, c.workload.seed) for c in cells] == [
        ("vllm", 0),
        ("vllm", 7),
        ("cachettl", 0),
        ("cachettl", 7),
    ]


def test_the_key_depends_on_every_argument():
    base = cells_of(SMALL)[0]
    others = [
        cells_of(replace(SMALL, seeds=(1,)))[0],
        cells_of(replace(SMALL, rate=0.06))[0],
        cells_of(replace(SMALL, engine=replace(SMALL.engine, blocks=8_001)))[0],
        cells_of(SMALL)[1],
    ]
    assert len({run.cell_key(c) for c in [base, *others]}) == 5
    assert run.cell_key(base) == run.cell_key(cells_of(SMALL)[0])


def test_json_has_no_wall_time():
    cells = cells_of(SimOptions(arms="cachettl,oracle"))
    results = [
        CellResult({"mean_jct_s": 120.0}, {"wall_s": 1.0, "cpu_s": 1.0}),
        CellResult({"mean_jct_s": 100.0}, {"wall_s": 2.0}),
    ]
    text = run.to_json(cells, results)
    assert "wall" not in text
    other = [CellResult(r.metrics, {"wall_s": 99.0}) for r in results]
    assert run.to_json(cells, other) == text


def written(out: Path, *more: str) -> bytes:
    """What two small cells write to `out`."""
    arguments = ["sim", "--programs", "2", "--rate", "0.5", "--blocks", "1500"]
    arguments += ["--arms", "vllm,cachettl", "--out", out, *more]
    output_of(app, *arguments)
    return out.read_bytes()


def test_two_runs_write_the_same_bytes_and_the_second_is_cached(tmp_path, monkeypatch):
    pytest.importorskip("vllm")
    monkeypatch.chdir(tmp_path)
    alone = ("--processes", "1")
    first = written(tmp_path / "a.json", *alone)
    assert first == written(tmp_path / "b.json", *alone)
    assert first == written(tmp_path / "c.json", "--no-cache", *alone)
    assert len(list((tmp_path / run.CACHE).glob("*.json"))) == 2


@pytest.mark.nightly
def test_processes_of_their_own_write_the_same_bytes(tmp_path, monkeypatch):
    pytest.importorskip("vllm")
    monkeypatch.chdir(tmp_path)
    alone = written(tmp_path / "a.json", "--no-cache", "--processes", "1")
    assert alone == written(tmp_path / "b.json", "--no-cache", "--processes", "2")
