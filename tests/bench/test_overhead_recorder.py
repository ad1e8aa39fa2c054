"""The bench of the recorder measures what it says; small runs prove no bar."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from bench.cli import app
from bench.micro.overhead_recorder import MAX_STEP_MS, RecorderCost, measure


def test_every_event_is_written_and_the_arms_see_the_same_turns():
    cost = measure(steps=400, memory_events=2000)
    assert cost.dropped == 0
    # 256 first turns, then 400 steps of 256 / 200 turns of four events and more.
    turns = 256 + 400 * 256 // 200
    assert 4 * turns < cost.events < 12 * turns
    assert cost.bare_ms > 0
    assert cost.writer_ms > 0


def test_both_bars_are_judged():
    def cost(step_ms: float, end_bytes: int) -> RecorderCost:
        return RecorderCost(1, 1, 0, 1.0, step_ms, 0.0, 1, (100, end_bytes))

    assert cost(MAX_STEP_MS, 105).passed
    assert not cost(MAX_STEP_MS * 1.01, 105).passed
    assert not cost(MAX_STEP_MS, 106).passed


def test_the_command_writes_its_numbers(tmp_path: Path):
    out = tmp_path / "recorder.json"
    args = ["overhead", "--recorder", "--steps", "400", "--events", "2000"]
    result = CliRunner().invoke(app, [*args, "--json", str(out)])
    assert result.exit_code in (0, 1), result.output
    assert "a step, 256 running" in result.output
    assert json.loads(out.read_text())["steps"] == 400
    assert CliRunner().invoke(app, ["overhead"]).exit_code == 2
