"""The timeline's bars, and that a picture is written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib import image

from bench.compare import timeline
from bench.sim.metrics import TurnRecord
from tests.bench.samples import served


def turn(index: int, arrival_s: float, departure_s: float, cached: int) -> TurnRecord:
    return served(
        turn=index,
        arrival_s=arrival_s,
        departure_s=departure_s,
        queue_s=0.25,
        prompt_tokens=1000 * (index + 1),
        cached_tokens=cached,
        output_token_ids=(1, 2),
    )


def three_turns() -> list[TurnRecord]:
    return [turn(0, 0.0, 1.0, 0), turn(1, 2.0, 3.0, 992), turn(2, 5.0, 6.0, 640)]


def test_bars_cover_a_program_without_holes() -> None:
    (row,) = timeline.bars(three_turns()).values()
    assert row == {
        timeline.WAITING: [(0.0, 0.25), (2.0, 0.25), (5.0, 0.25)],
        timeline.RUNNING: [(0.25, 0.75), (2.25, 0.75), (5.25, 0.75)],
        timeline.GAP_KEPT: [(1.0, 1.0)],
        timeline.GAP_LOST: [(3.0, 2.0)],
    }


def test_a_picture_with_a_panel_an_arm_is_written(tmp_path: Path) -> None:
    records = three_turns()
    others = [replace(record, program_id="other") for record in records]
    path = tmp_path / "deep" / "timeline.png"
    arms = {"vanilla": records, "ttlcache": [*records, *others]}
    timeline.draw(arms, path, "two arms")
    picture = image.imread(path)
    assert picture.shape[0] > 300
    assert picture.shape[1] > 1200
    for colour in timeline.COLOURS.values():
        rgb = [int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5)]
        match = abs(picture[..., :3] - rgb).max(axis=-1) < 0.01
        assert match.sum() > 50, f"{colour} is not in the picture"


def test_an_arm_without_records_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing to summarize"):
        timeline.draw({"vanilla": []}, tmp_path / "t.png", "empty")
