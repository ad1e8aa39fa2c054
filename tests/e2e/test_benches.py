"""Commands that start servers of their own, in small."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bench.cli import app
from bench.compare.validate import ValidateOptions, validate
from tests.commands import output_of

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]


def result_in(folder: Path) -> dict[str, Any]:
    """What a bench wrote down."""
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return found


def test_vllms_own_load_generator_runs_to_its_end(tmp_path, tiny_model):
    small = ["--programs", "2", "--rounds", "1", "--blocks", "97"]
    size = ["--token-scale", "0.01", "--gap-cap", "0.2", "--rate", "4"]
    to = ["--out", tmp_path, "--model", tiny_model]
    printed = output_of(app, "harness", "vllm-bench", *small, *size, *to)
    place = tmp_path / "vllm-bench"
    told = result_in(place)
    assert told["problems"] == []
    ((base, ours),) = (each.values() for each in told["rounds"])
    trace = place / "round-0" / "base" / "trace.jsonl"
    requests = len(trace.read_text().splitlines())
    for run in (base, ours):
        assert run["exit_status"] == 0
        assert run["metrics"]["completed"] == requests > 4
        assert run["metrics"]["failed"] == 0
    assert base["engine"]["pins"] == {}
    assert ours["engine"]["pins"]["claimed"] > 0  # found without any hint
    assert "mean_ttft_ms" in printed


def test_connectors_above_lmcache_servers_of_their_own(tmp_path, tiny_model):
    """`bench settings`: every kind of arm runs on the same programs."""
    below = '{"lower_tier": "lmcache", "policy": "none"}'
    output_of(
        app,
        *("settings", "--with", "vanilla", "--with", "lmcache", "--with", below),
        *("--no-hints", "--programs", "4", "--at-once", "4", "--rounds", "1"),
        *("--blocks", "97", "--token-scale", "0.035", "--chunk-tokens", "32"),
        *("--cpu-gb", "0.25", "--out", tmp_path, "--model", tiny_model),
    )
    told = result_in(tmp_path)
    (round_,) = told["rounds"]
    assert told["problems"] == []
    assert list(round_) == ["vanilla", "lmcache", below]
    vanilla, lmcache, ours = round_.values()
    for arm in (vanilla, lmcache):
        assert arm["num_turns"] == ours["num_turns"] > 0
        assert arm["pins"] == {}
    for arm in (lmcache, ours):
        assert arm["lower_tier_hits"] > 0  # both reload from their servers
    assert ours["tier_bytes"]["promoted"] > 0
    logs = tmp_path / "round-0"
    assert (logs / "server-1.lmcache.log").exists()
    assert (logs / "server-2.lmcache.log").exists()


def test_the_simulator_predicts_a_light_load(tmp_path):
    options = ValidateOptions(
        programs=6, arms="vllm,adaptive", rates=(0.2,), rounds=1, out=tmp_path
    )
    validate(options, Console())
    found = result_in(tmp_path)
    assert found["profile"]["held_out_error"] < 0.25
    measured = [cell for cell in found["cells"] if cell["measured"]]
    if not measured:
        pytest.skip("every run waited for a core: this machine is busy")
    for cell in measured:
        (run,) = cell["measured"]
        assert cell["predicted"]["mean_jct_s"] == pytest.approx(
            run["mean_jct_s"], rel=0.25
        )


@pytest.mark.speed
def test_the_seconds_that_explain_tells_are_those_that_prefills_take(
    tmp_path, tiny_model
):
    output_of(app, "prices", "--out", tmp_path, "--model", tiny_model)
    assert result_in(tmp_path)["claims"]
