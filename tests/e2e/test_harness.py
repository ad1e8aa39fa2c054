"""`bench harness` on real servers: a load generator that others wrote."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from bench.cli import app

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]


def test_vllms_own_load_generator_runs_to_its_end(tmp_path, tiny_model):
    small = ["--programs", "2", "--rounds", "1", "--blocks", "97"]
    size = ["--token-scale", "0.01", "--gap-cap", "0.2", "--rate", "4"]
    to = ["--out", str(tmp_path), "--model", str(tiny_model)]
    result = CliRunner().invoke(app, ["harness", "vllm-bench", *small, *size, *to])
    assert result.exit_code == 0, result.output
    place = tmp_path / "vllm-bench"
    told = json.loads((place / "result.json").read_text())
    assert told["problems"] == []
    ((vanilla, ours),) = (each.values() for each in told["rounds"])
    trace = place / "round-0" / "vanilla" / "trace.jsonl"
    requests = len(trace.read_text().splitlines())
    for run in (vanilla, ours):
        assert run["exit_status"] == 0
        assert run["metrics"]["completed"] == requests > 4
        assert run["metrics"]["failed"] == 0
    assert vanilla["engine"]["pins"] == {}
    assert ours["engine"]["pins"]["claimed"] > 0  # found without any hint
    assert "mean_ttft_ms" in result.output
