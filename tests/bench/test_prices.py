"""`bench prices`: what is told against what is measured."""

from __future__ import annotations

import pytest

from bench.compare.prices import Prices


def test_lengths_between_the_timed_ones_lie_between_their_seconds():
    prices = Prices({1_000: 1.0, 3_000: 5.0}, [(500, 1.0), (2_000, 3.0)])
    assert prices.should_be_s == [0.5, 3.0]
    assert prices.ratios == [2.0, 1.0]
    assert prices.ratio == pytest.approx(4.0 / 3.5)
