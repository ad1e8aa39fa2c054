"""Policy `observe` beside plain vLLM: the same steps, and no block is held."""

from __future__ import annotations

import random

from tests.connector.conftest import totals
from ttlcache_sim.harness import EngineHarness, EngineSpec

SIZES = {"num_blocks": 40, "max_num_seqs": 4, "max_num_batched_tokens": 128}


def test_every_step_is_vllms_own(make_engine, clock):
    """Six agents of several turns, more than the pool holds."""
    watched = make_engine(extra_config={"policy": "observe"}, **SIZES)
    plain = EngineHarness(EngineSpec(connector=False, **SIZES))
    rng = random.Random(3)
    contexts = {name: list(range(1000 * n, 1000 * n + 200)) for n, name in NUMBERED}
    for number in range(24):
        name = rng.choice(sorted(contexts))
        for engine in (watched, plain):
            engine.add(
                f"{name}-{number}",
                contexts[name],
                max_tokens=8,
                hints={"program_id": name},
            )
        contexts[name] = [*contexts[name], *range(number, number + 30)]
        for _ in range(rng.randrange(20)):
            same_step(watched, plain, clock)
    while plain.scheduler.has_unfinished_requests():
        same_step(watched, plain, clock)
    assert totals(watched)["prefill_tokens_savable"] > 0
    assert "claimed_tokens" not in totals(watched)


NUMBERED = list(enumerate("abcdef", 1))


def same_step(watched, plain, clock):
    steps = [engine.step() for engine in (watched, plain)]
    seen, expected = (list(step.num_scheduled_tokens.items()) for step in steps)
    assert seen == expected
    assert not watched.holder.held
    clock.advance(0.01)
