"""Whatever comes: random agents, a server that dies."""

from __future__ import annotations

import itertools
import random
import time
from dataclasses import replace

import pytest

from tests.e2e.tier_bytes.worker import (
    WAIT_S,
    empty_gpu,
    hints,
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
    rng = random.Random(7)
    # Contexts of their own: what an earlier case left below would be found.
    first = 200 * len(mode)
    contexts = {f"{mode}{i}": prompt(first + i, 60) for i in range(6)}
    running: dict[str, str] = {}
    deadline = time.monotonic() + WAIT_S
    # On a fast machine the first rounds are over before a pin expires.
    for number in itertools.count():
        both = {"tier_bytes:demoted", "tier_bytes:promoted"}
        if number >= 40 and both <= engine.moved.keys():
            break
        assert time.monotonic() < deadline, engine.moved
        name = rng.choice(sorted(contexts))
        if name not in running.values():
            request_id = f"{name}-{number}"
            tokens = [*contexts[name], *prompt(number, rng.randrange(1, 30))]
            if len(tokens) > 350:
                tokens = prompt(1000 + number, 60)
            last = rng.random() < 0.1
            engine.add(
                request_id,
                tokens,
                max_tokens=rng.randrange(2, 20),
                hints=hints(name, last=last),
            )
            running[request_id] = name
        for _ in range(rng.randrange(1, 8)):
            engine.step()
        if running and rng.random() < 0.05:
            victim = rng.choice(sorted(running))
            engine.abort(victim)
            del running[victim]
        for request_id in [r for r in running if r in engine.finished]:
            contexts[running.pop(request_id)] = list(
                engine.finished[request_id].all_token_ids
            )
        if rng.random() < 0.2:
            time.sleep(0.02)
    engine.run()
    if mode != "on-expiry":
        # What lingers would stay for ever; what is being copied goes on.
        engine.connector.scheduler_role.upkeep.release_all()
    engine.settle()
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
