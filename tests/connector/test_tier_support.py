"""Models of which LMCache can hold nothing: no lower tier, and everything else."""

from __future__ import annotations

import logging

import pytest

pytest.importorskip("lmcache", reason="the matrix of vLLM versions has no LMCache")

from tests.connector.conftest import HOLD_5S, totals
from ttlcache_connector.tiers import factory

BELOW = {**HOLD_5S, "lower_tier": "lmcache", "lmcache.mp.port": 1}


@pytest.fixture
def logged(monkeypatch, caplog):
    monkeypatch.setattr(factory, "log", logging.getLogger("tests.tier_support"))
    return caplog


@pytest.mark.parametrize(
    ("groups", "kind"),
    [({"sliding_window": 64}, "SlidingWindow"), ({"mamba_mode": "align"}, "Mamba")],
)
def test_a_hybrid_model_runs_without_a_lower_tier_and_says_so(
    make_engine, logged, groups, kind
):
    """No server listens where the tier would be: none is asked."""
    engine = make_engine(num_blocks=200, extra_config=BELOW, **groups)
    (told,) = (t for t in logged.messages if "no lower tier for this model" in t)
    assert f"nothing of layers of the kind {kind};" in told
    hints = {"program_id": "hybrid", "tool": "x"}
    context = engine.turn("first", range(100), hints=hints)
    engine.turn("second", [*context, 7], hints=hints)
    found = totals(engine)
    assert found["pins:claimed"] == 1
    assert not [name for name in found if name.startswith(("demotions", "tier_"))]
    assert engine.controller.tier.source is None
