"""`explain` tells seconds that prefills really take."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from bench.cli import app


@pytest.mark.e2e
@pytest.mark.speed
def test_told_seconds_are_measured_seconds(tmp_path, tiny_model):
    result = CliRunner().invoke(
        app, ["prices", "--out", str(tmp_path), "--model", str(tiny_model)]
    )
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "result.json").read_text())["claims"]
