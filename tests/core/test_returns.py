from __future__ import annotations

import pytest

from ttlcache.estimators.gap_history import GapHistory
from ttlcache.estimators.returns import ENOUGH, expected_gap_s
from ttlcache.types import GapKey

PYTEST = GapKey("bash", "pytest")


def history(**durations_s: list[float]) -> GapHistory:
    gaps = GapHistory()
    for executable, values in durations_s.items():
        for value in values:
            gaps.observe(GapKey("bash", executable), value)
    return gaps


def test_the_median_of_the_gaps_that_lasted_longer():
    gaps = history(pytest=[1.0] * 20 + [10.0] * 5 + [20.0] * 4)
    assert expected_gap_s(gaps, PYTEST, 0.0) == 1.0
    assert expected_gap_s(gaps, PYTEST, 5.0) == 10.0


def test_thin_data_backs_off_to_the_tool():
    gaps = history(pytest=[2.0] * (ENOUGH - 1), ls=[7.0] * ENOUGH)
    assert expected_gap_s(gaps, PYTEST, 0.0) == pytest.approx(7.0)


def test_nobody_lasted_as_long():
    gaps = history(pytest=[1.0] * 100)
    assert expected_gap_s(gaps, PYTEST, 1.0) is None
    assert expected_gap_s(GapHistory(), PYTEST, 0.0) is None
