"""Whatever comes: random agents, a server that dies."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from tests.e2e.tier_bytes.worker import (
    WAIT_S,
    empty_gpu,
    hints,
    play_random_agents,
    prompt,
    step_until,
)
from tests.waiting import becomes
from ttlcache_connector.blocks import expired

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize(
    ("mode", "server"),
    [
        ("on-expiry", "tiers"),
        ("on-pressure", "tiers"),
        ("on-pressure", "two_block_tiers"),
        ("write-through", "tiers"),
    ],
)
def test_random_agents_on_a_small_pool(make_worker, monkeypatch, request, mode, server):
    """Expiry, claims, victims, preemptions, aborts: whatever comes, no wrong byte."""
    monkeypatch.setattr(expired, "COPY_WAIT_S", 0.05)
    engine = make_worker(
        num_blocks=40,
        ttl_s=0.05,
        tiers=request.getfixturevalue(server),
        demote=mode,
        max_pinned_fraction=0.5,  # some pins hold a part of their turn only
    )
    both = {"tier_bytes:demoted", "tier_bytes:promoted"}
    # Contexts of their own: what an earlier case left below would be found. On a fast
    # machine the first rounds are over before a pin expires.
    play_random_agents(
        engine,
        mode,
        first_seed=200 * len(mode),
        is_enough=lambda number: number >= 40 and both <= engine.moved.keys(),
    )
    assert engine.pool.get_num_free_blocks() == 39


def test_a_server_that_dies_under_way(make_worker, tiers):
    """Loads fail, tokens are computed, nothing is wrong and nothing hangs."""
    engine = make_worker(num_blocks=200, **{"lmcache.mp.mq_timeout": 1.0})
    contexts = [
        engine.turn(f"first-{i}", prompt(500 + i, 100), hints=hints(f"d{i}"))
        for i in range(8)
    ]
    engine.settle()
    empty_gpu(engine)
    for index, context in enumerate(contexts):
        engine.add(f"next-{index}", [*context, 9], hints=hints(f"d{index}", last=True))
    engine.step()
    tiers.kill()
    step_until(engine, lambda: all(f"next-{i}" in engine.finished for i in range(8)))
    assert engine.pool.get_num_free_blocks() == 199
    tiers.options = replace(tiers.options)
    tiers.start()
    assert becomes(engine.connector.scheduler_role.parts.lower.is_up, WAIT_S)
    promoted = engine.moved.get("tier_bytes:promoted", 0)
    numbers = itertools.count()

    def is_promoted() -> bool:
        number = next(numbers)
        context = engine.turn(f"back-{number}", prompt(900, 100), hints=hints("back"))
        engine.settle()
        empty_gpu(engine)
        last = hints("back", last=True)
        engine.turn(f"again-{number}", [*context, 9], hints=last)
        return engine.moved.get("tier_bytes:promoted", 0) > promoted

    # The two roles notice each for itself that the server is back.
    assert becomes(is_promoted, 3 * WAIT_S)
