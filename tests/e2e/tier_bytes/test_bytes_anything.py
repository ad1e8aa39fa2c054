"""Whatever comes: random agents, a server that dies."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from tests.e2e.tier_bytes.worker import (
    WAIT_S,
    empty_gpu,
    hints,
    play_random_agents,
    prompt,
)
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
    time.sleep(0.25)
    engine.settle()
    empty_gpu(engine)
    for index, context in enumerate(contexts):
        engine.add(f"next-{index}", [*context, 9], hints=hints(f"d{index}", last=True))
    engine.step()
    tiers.kill()
    began = time.monotonic()
    while any(f"next-{i}" not in engine.finished for i in range(8)):
        engine.step()
        assert time.monotonic() - began < WAIT_S
    assert engine.pool.get_num_free_blocks() == 199
    tiers.options = replace(tiers.options)
    tiers.start()
    deadline = time.monotonic() + WAIT_S
    while not engine.connector.scheduler_role.parts.lower.is_up():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    promoted = engine.moved.get("tier_bytes:promoted", 0)
    deadline = time.monotonic() + 3 * WAIT_S
    number = 0
    # The two roles notice each for itself that the server is back.
    while engine.moved.get("tier_bytes:promoted", 0) == promoted:
        assert time.monotonic() < deadline
        number += 1
        context = engine.turn(f"back-{number}", prompt(900, 100), hints=hints("back"))
        time.sleep(0.25)
        engine.settle()
        empty_gpu(engine)
        last = hints("back", last=True)
        engine.turn(f"again-{number}", [*context, 9], hints=last)
