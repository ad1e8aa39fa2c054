"""Under a scheduler class that is not ours: still pins, still cannot wedge.

vLLM's own asks nothing; the one in `own_scheduler` asks the connector for order, room
and memory.
"""

import random

import pytest

from tests.connector.conftest import (
    ASKING,
    FOREVER,
    HOLD_ALL,
    VLLM_OWN,
    begin,
    free,
    pinned,
    start,
)
from ttlcache_connector.connector import TTLConnector


def test_the_start_is_told_once(make_engine, our_log):
    engine = make_engine(num_blocks=40, scheduler_cls=VLLM_OWN)
    engine.turn("A-1", range(149))
    engine.turn("B-1", range(149))
    assert sum("policy=fixed" in line for line in our_log) == 1


def test_one_that_asks_leaves_older_programs_their_pins(make_engine):
    # 9 blocks of A are pinned, R takes 7 and runs; D needs 19 of the 14 that are free.
    engine = make_engine(num_blocks=31, extra_config=FOREVER, scheduler_cls=ASKING)
    start(engine, "A", 140)
    engine.run()
    assert pinned(engine) == 9
    begin(engine, "R", 100, max_tokens=12)
    start(engine, "D", 290)
    while "R-1" not in engine.finished:
        assert [r.request_id for r in engine.scheduler.waiting] == ["D-1"]
        engine.step()
    assert pinned(engine) >= 9
    engine.run(max_steps=100)  # nothing runs: they give way
    assert "D-1" in engine.finished


@pytest.mark.parametrize("seed", range(6))
def test_one_that_asks_never_wedges(make_engine, clock, seed):
    """Six programs of four turns on a tiny pool; `bench wedge` plays with ours."""
    rng = random.Random(seed)
    engine = make_engine(
        num_blocks=24,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        scheduler_cls=ASKING,
        extra_config=HOLD_ALL | {"admission": rng.choice(("none", "room-to-grow"))},
    )
    contexts = {f"P{i}": [i] * rng.randrange(5, 60) for i in range(6)}
    for turn in range(4):
        for program, context in contexts.items():
            engine.add(
                f"{program}-{turn}",
                context + [rng.randrange(1000)] * rng.randrange(1, 20),
                max_tokens=rng.randrange(1, 12),
                hints={"program_id": program, "is_last_step": turn == 3},
            )
            for _ in range(rng.randrange(3)):
                engine.step()
        engine.run(max_steps=2000)
        for program in contexts:
            request = engine.finished[f"{program}-{turn}"]
            contexts[program] = list(request.all_token_ids)
        clock.advance(rng.uniform(-1, 20))
    assert free(engine) == 23


def test_the_guard_and_the_queue_ask_the_connector(make_engine, monkeypatch):
    """A class derived from ours may answer in its own way."""
    asked = set()
    for name in ("priority", "admission", "eviction"):
        ours = getattr(TTLConnector, name)

        def answer(self, *args, name=name, ours=ours):
            asked.add(name)
            return ours(self, *args)

        monkeypatch.setattr(TTLConnector, name, answer)
    engine = make_engine(num_blocks=21, extra_config=FOREVER)
    start(engine, "A", 150)
    engine.run()
    begin(engine, "B", 100)
    start(engine, "C", 250)
    engine.run()
    assert asked == {"priority", "admission", "eviction"}
