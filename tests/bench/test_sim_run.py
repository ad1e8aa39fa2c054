"""Options, cache, JSON, command line."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from bench.cli import app
from bench.sim import run
from bench.sim.options import SimOptions, cells_of
from bench.sim.rivals.arms import ARMS
from bench.sim.settings import EngineSetting
from tests.commands import output_of

SMALL = SimOptions(programs=10, engine=EngineSetting(blocks=8_000))


def test_static_ttl_is_the_cold_start_of_the_mean_context():
    extra = ARMS["static-ttl"].extra_config(math.e)
    assert extra["policy_options"]["ttl_s"] == pytest.approx(1.0)


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
    assert first == written(tmp_path / "c.json", "--no-cache", "--processes", "2")
    assert len(list((tmp_path / run.CACHE).glob("*.json"))) == 2
