"""How far the tier is believed, learnt of what comes back of a real LMCache server."""

from __future__ import annotations

from typing import Any

import pytest

from bench.tier_server import TierServer
from tests.e2e.tier_bytes.worker import Worker, empty_gpu, hints, prompt
from ttlcache.costs import MIN_LOST

pytestmark = pytest.mark.e2e

PROGRAMS = 2 * MIN_LOST


def test_returns_tell_what_the_tier_keeps(
    make_worker: Any, two_block_tiers: TierServer
) -> None:
    """Chunks are of two blocks: a tail that fills none is not held against it."""
    engine: Worker = make_worker(num_blocks=200, tiers=two_block_tiers)
    controller = engine.connector.side.controller
    totals = controller.metrics.totals
    contexts = [
        engine.turn(f"first-{i}", prompt(500 + i, 200), hints=hints(f"kept-{i}"))
        for i in range(PROGRAMS)
    ]
    engine.settle()
    empty_gpu(engine)
    contexts = _return(engine, "second", contexts)
    engine.settle()  # where a reload came from is known steps later
    assert totals["reloads", "cpu"] == PROGRAMS
    assert controller.costs.kept_share == 1.0

    empty_gpu(engine)
    assert two_block_tiers.clear_cpu()  # it had room for nobody
    _return(engine, "third", contexts)
    engine.settle()
    assert totals["reloads", "cpu"] == PROGRAMS
    assert controller.costs.kept_share == pytest.approx(0.5, abs=0.05)
    # A newcomer finds nothing either, which says nothing of the tier.
    before = controller.costs.kept_share
    engine.turn("new", prompt(600, 200), hints=hints("kept-new"))
    assert controller.costs.kept_share == before


def _return(engine: Worker, name: str, contexts: list[list[int]]) -> list[list[int]]:
    return [
        engine.turn(f"{name}-{i}", [*context, 5], hints=hints(f"kept-{i}"))
        for i, context in enumerate(contexts)
    ]
