"""A real server's step times predict it: `bench validate` in small."""

from __future__ import annotations

import json

import pytest
from rich.console import Console

from bench.compare.validate import ValidateOptions, validate

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]


def test_the_simulator_predicts_a_light_load(tmp_path):
    options = ValidateOptions(
        programs=6, arms="vllm,adaptive", rates=(0.2,), rounds=1, out=tmp_path
    )
    validate(options, Console())
    found = json.loads((tmp_path / "result.json").read_text())
    assert found["profile"]["held_out_error"] < 0.25
    for cell in found["cells"]:
        (run,) = cell["measured"] or [None]
        if run is not None:  # else the machine was busy
            assert cell["predicted"]["mean_jct_s"] == pytest.approx(
                run["mean_jct_s"], rel=0.25
            )
