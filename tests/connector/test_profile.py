"""The offline profile on an engine whose cost is known."""

from __future__ import annotations

import json

import pytest

from ttlcache.costs import CostModel
from ttlcache_connector.cli.profile import FIRST_TOKENS, fit, profile

A, B, C = 2e-5, 3e-10, 0.004


class Engine:
    """Time passes only while it prefills."""

    def __init__(self, scale: float = 1.0) -> None:
        self.now_s = 0.0
        self.asked: list[int] = []
        self.scale = scale

    def measure(self, tokens: int) -> float:
        self.asked.append(tokens)
        # A stall in every second measurement: the fastest counts.
        stall = 0.5 * (len(self.asked) % 2)
        seconds = self.scale * (A * tokens + B * tokens**2 + C) + stall
        self.now_s += seconds
        return seconds


def test_a_known_curve_is_found_and_unseen_lengths_are_predicted():
    engine = Engine()
    curve = profile(engine.measure, 32_000, 90.0, lambda: engine.now_s)
    assert curve.coefficients == pytest.approx((A, B, C), rel=1e-6)
    assert [n for n, _, _ in curve.fitted] == [1000, 2000, 4000, 8000, 16000, 32000]
    assert [n for n, _, _ in curve.unseen] == [1500, 3000, 6000, 12000, 24000]
    assert curve.median_error < 1e-6


def test_it_ends_within_its_budget():
    engine = Engine(scale=100.0)
    curve = profile(engine.measure, 1_000_000, 60.0, lambda: engine.now_s)
    assert engine.now_s < 60.0 * 1.5
    assert len(curve.fitted) >= 2


def test_a_short_model_is_profiled_as_far_as_it_goes():
    engine = Engine()
    curve = profile(engine.measure, 700, 90.0, lambda: engine.now_s)
    assert [n for n, _, _ in curve.fitted] == [700]
    assert max(engine.asked) == 700
    assert FIRST_TOKENS > 700


def test_no_coefficient_is_negative():
    shrinking = [(1000, 1.0), (2000, 1.1), (4000, 1.15), (8000, 1.16)]
    coefficients = fit(shrinking)
    assert min(coefficients) >= 0.0
    assert CostModel({"prefill": list(coefficients)}).prefill_s(3000) > 0


def test_the_file_is_what_the_connector_reads(tmp_path):
    from ttlcache.config import load_config
    from ttlcache_connector.knowledge import load_costs

    path = tmp_path / "profile.json"
    path.write_text(json.dumps({"prefill": list(fit([(1000, 0.1), (2000, 0.2)]))}))
    costs = load_costs(load_config({"profile_path": str(path)}))
    assert costs.prefill_s(1500) == pytest.approx(0.15, rel=0.05)
