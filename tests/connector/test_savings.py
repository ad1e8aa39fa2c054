"""What a claim saves against plain vLLM, on vLLM's real scheduler and block pool.

Blocks hold 16 tokens. The pool has 40 blocks, 39 without vLLM's null block. A turn of
149 tokens of prompt and 20 of output leaves 10 blocks with a hash and one without.
"""

from __future__ import annotations

import random

import pytest

from tests.connector.conftest import HOLD_5S, totals

FOREVER = {"policy": "fixed", "policy_options": {"ttl_s": 1000.0}}
PROMPT = list(range(1, 150))
TURN_BLOCKS, FREE_BEFORE = 10, 29  # at the first turn's end: 39 less its 10


def saved(engine):
    counted = totals(engine)
    return counted["claimed_tokens"], counted.get("prefill_tokens_saved", 0)


def first_turn(engine, program="A", prompt=PROMPT):
    hints = {"program_id": program, "tool": "bash"}
    return engine.turn(f"{program}-1", prompt, max_tokens=20, hints=hints)


def next_turn(engine, context, program="A"):
    """Returns the tokens that it found in GPU memory."""
    hints = {"program_id": program, "is_last_step": True}
    engine.add(f"{program}-2", [*context, *[7] * 30], hints=hints)
    (started,) = engine.step().scheduled_new_reqs
    engine.run()
    return started.num_computed_tokens


def take(engine, name, blocks):
    """A request that leaves so many blocks with a hash, and none without."""
    prompt = [1000 + int(name) * 500 + i for i in range(16 * blocks - 1)]
    hints = {"program_id": f"other-{name}", "is_last_step": True}
    engine.turn(name, prompt, max_tokens=2, hints=hints)


def test_an_engine_with_memory_for_all_saves_nothing(make_engine, async_scheduling):
    engine = make_engine(
        num_blocks=200, extra_config=FOREVER, async_scheduling=async_scheduling
    )
    contexts = {}
    for number in range(6):
        prompt = [number * 1000 + i for i in range(149)]
        contexts[str(number)] = first_turn(engine, str(number), prompt)
    for program, context in contexts.items():
        next_turn(engine, context, program)
    assert saved(engine) == (6 * 160, 0)


@pytest.mark.parametrize(
    ("others", "lost_blocks"),
    [
        ([20], 0),  # 19 blocks stood behind it in the queue, and 10 blocks before
        ([15, 14], 0),  # all that stood before it, and no more
        ([15, 15], 1),
        ([15, 15, 4], 5),
        ([15, 15, 15], 10),
    ],
)
def test_a_turn_loses_its_tail_block_by_block(make_engine, others, lost_blocks):
    """Plain vLLM takes the blocks that stood before it, then the turn's last one."""
    engine = make_engine(num_blocks=40, extra_config=FOREVER)
    context = first_turn(engine)
    for number, blocks in enumerate(others):
        take(engine, str(number), blocks)
    next_turn(engine, context)
    assert saved(engine) == (160, 16 * lost_blocks)


@pytest.mark.parametrize("others", [[20], [15, 14], [15, 15], [15, 15, 4], [15] * 3])
def test_plain_vllm_finds_what_the_count_says(make_engine, others):
    """The same requests without our connector: what hits there is not saved here."""
    hits = {}
    for ours in (False, True):
        engine = make_engine(num_blocks=40, connector=ours, extra_config=FOREVER)
        if not ours:
            engine.on_step = None
        context = first_turn(engine)
        for number, blocks in enumerate(others):
            take(engine, str(number), blocks)
        hits[ours] = next_turn(engine, context)
    assert saved(engine) == (hits[True], hits[True] - hits[False])


def test_what_others_use_as_well_is_not_saved(make_engine):
    engine = make_engine(num_blocks=60, extra_config=FOREVER)
    shared = list(range(1, 81))  # five blocks
    context = first_turn(engine, "A", [*shared, *range(5000, 5069)])
    first_turn(engine, "B", [*shared, *range(6000, 6069)])
    for number in range(4):
        take(engine, str(number), 25)
    next_turn(engine, context)
    assert saved(engine) == (160, 80)


def test_several_kv_cache_groups_keep_all_or_nothing(make_engine):
    claims = []
    for others in (1, 6):
        engine = make_engine(num_blocks=80, sliding_window=48, extra_config=FOREVER)
        context = first_turn(engine)
        for number in range(others):
            take(engine, str(number), 15)
        next_turn(engine, context)
        claims.append(saved(engine))
    assert claims == [(160, 0), (160, 160)]


@pytest.mark.parametrize("seed", range(5))
def test_no_more_is_saved_than_was_claimed(make_engine, clock, seed):
    rng = random.Random(f"savings {seed}")
    engine = make_engine(num_blocks=60, extra_config=HOLD_5S)
    contexts = {str(n): [n * 1000 + i for i in range(90)] for n in range(5)}
    for turn in range(6):
        for program, context in contexts.items():
            more = [rng.randrange(9000) for _ in range(rng.randrange(1, 40))]
            hints = {"program_id": program, "tool": "bash"}
            engine.add(f"{program}-{turn}", [*context, *more], hints=hints)
        engine.run()
        for program in contexts:
            done = engine.finished[f"{program}-{turn}"]
            contexts[program] = list(done.all_token_ids)
        clock.advance(rng.uniform(0.0, 6.0))
    counted = totals(engine)
    claimed = counted.get("claimed_tokens", 0)
    assert 0 <= counted.get("prefill_tokens_saved", 0) <= claimed
