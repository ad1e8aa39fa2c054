"""Tails below while their heads stay in GPU memory, and what is known to be below."""

from __future__ import annotations

import math
from typing import Any

import pytest

from bench.serve.tier_server import TierServer
from tests.e2e.tier_bytes.worker import (
    BLOCK,
    CHUNK_BYTES,
    Worker,
    empty_gpu,
    hints,
    prompt,
    reclaim,
    step_until,
    use_free_memory,
)
from ttlcache.types import ReleaseMode, Urgency

pytestmark = pytest.mark.e2e


def test_what_went_down_while_its_next_turn_waited_is_found(make_worker, tiers):
    """That turn had asked what is below when it came, and was told: the first half."""
    engine = make_worker(num_blocks=64, ttl_s=60.0)
    side = engine.connector.side
    # Its pin is whole when it comes: it would not ask.
    side.stored_tokens = lambda request: math.inf
    lookup = side.lower.tier._adapter.check_lookup_result

    def give_way(copies: int) -> None:
        reclaimed = side.controller.memory.reclaim(
            12, Urgency.RUNNING, "runs", mode=ReleaseMode.COPY_FIRST
        )
        assert reclaimed > 0
        totals = side.controller.telemetry.metrics.totals
        step_until(engine, lambda: totals["demotions", "stored"] == copies)

    engine.add("runs", prompt(80, 40 * BLOCK), max_tokens=400, hints=hints("old"))
    engine.step()
    context = engine.turn_beside("a", prompt(81, 100), hints=hints("found"))
    give_way(1)
    half = len(context) // BLOCK * BLOCK
    grown = [*context, *prompt(84, 100)]
    context = engine.turn_beside("a2", grown, hints=hints("found"))
    # 13 blocks beside its pin, where 10 are free.
    engine.add("b", [*context, *prompt(82, 200)], hints=hints("found", last=True))
    step_until(engine, lambda: lookup("b") == half)
    for _ in range(3):
        engine.step()
    before = engine.moved.get("tier_bytes:promoted", 0)
    give_way(2)
    use_free_memory(engine)
    engine.abort("runs")
    engine.run()
    assert engine.finished["b"].num_output_tokens
    assert engine.moved["tier_bytes:promoted"] - before >= 10 * CHUNK_BYTES
    side.release_all()
    engine.settle()
    assert tiers.clear_cpu()  # what either lookup found is not locked


@pytest.mark.parametrize(
    ("blocks", "server"),
    [(5, "tiers"), (5, "two_block_tiers"), (4, "two_block_tiers")],
)
def test_a_tail_goes_down_alone_and_comes_back(make_worker, request, blocks, server):
    """Its head stays in GPU memory, and is not copied."""
    tiers: TierServer = request.getfixturevalue(server)
    chunk = tiers.options.chunk_tokens
    engine = make_worker(num_blocks=64, ttl_s=60.0, demote="on-pressure", tiers=tiers)
    side, seed = engine.connector.side, 90 + 10 * blocks + chunk
    step_until(engine, lambda: side.lower.tier.stores_suffixes)
    engine.add("runs", prompt(seed, 30 * BLOCK), max_tokens=400, hints=hints("old"))
    engine.step()
    context = engine.turn_beside("a", prompt(seed + 1, 200), hints=hints("p"))
    reclaim(engine, blocks)
    tail = -(-blocks * BLOCK // chunk) * (chunk // BLOCK)  # in whole chunks
    assert engine.moved["tier_bytes:demoted"] == tail * CHUNK_BYTES
    use_free_memory(engine)
    context = engine.turn_beside("b", [*context, 5], hints=hints("p"))
    # The block at its beginning that GPU memory has is not written.
    assert engine.moved["tier_bytes:promoted"] == tail * CHUNK_BYTES
    totals = side.controller.telemetry.metrics.totals
    assert totals["pins", "claimed"] == 1
    # The next turn owes its beginning still, and not what is below.
    reclaim(engine, 20)
    whole = (len(context) - 1) // chunk * (chunk // BLOCK)
    assert engine.moved["tier_bytes:demoted"] == whole * CHUNK_BYTES
    engine.abort("runs")
    engine.run()
    side.release_all()
    engine.settle()
    empty_gpu(engine)
    before = engine.moved["tier_bytes:promoted"]
    engine.turn("c", [*context, 6], hints=hints("p", last=True))
    assert engine.moved["tier_bytes:promoted"] - before == whole * CHUNK_BYTES
    engine.settle()
    assert tiers.clear_cpu()  # nothing that a lookup found is locked


def test_a_head_that_goes_while_its_turn_waits_for_its_tail(make_worker, tiers):
    """The lookup began behind it, and a new one begins before it."""
    engine = make_worker(num_blocks=64, ttl_s=60.0, demote="on-pressure")
    side = engine.connector.side
    step_until(engine, lambda: side.lower.tier.stores_suffixes)
    engine.add("runs", prompt(95, 40 * BLOCK), max_tokens=300, hints=hints("old"))
    engine.step()
    context = engine.turn_beside("a", prompt(96, 200), hints=hints("p"))
    reclaim(engine, 5)
    # It needs more than is free beside its pin.
    engine.add("b", [*context, *prompt(97, 200)], hints=hints("p", last=True))
    starts = side.lower.tier._lookups.starts
    step_until(engine, lambda: starts.of("b") == 7 * BLOCK)
    for _ in range(3):
        engine.step()
    reclaim(engine, 12)
    use_free_memory(engine)
    engine.abort("runs")
    engine.run()
    assert engine.finished["b"].num_output_tokens
    assert engine.moved["tier_bytes:promoted"] == 12 * CHUNK_BYTES
    side.release_all()
    engine.settle()
    assert tiers.clear_cpu()


def test_a_turn_whose_context_is_pinned_as_a_whole_asks_nothing(make_worker, tiers):
    """What follows it was never computed before: it begins in the step it came."""
    engine = make_worker(num_blocks=64, ttl_s=60.0, demote="on-pressure")
    half = engine.connector.side.lower.tier
    step_until(engine, lambda: half.stores_suffixes)
    asked: list[str] = []
    lookup = half._adapter.maybe_submit_lookup_request

    def note(request_id: str, *args: Any, **kwargs: Any) -> None:
        asked.append(request_id)
        lookup(request_id, *args, **kwargs)

    half._adapter.maybe_submit_lookup_request = note
    context = engine.turn("a", prompt(110, 200), hints=hints("p"))
    assert "a" in asked
    asked.clear()
    engine.add("b", [*context, *prompt(111, 100)], hints=hints("p"))
    engine.step()
    assert "b" in {r.request_id for r in engine.scheduler.running}
    engine.run()
    assert asked == []
    context = list(engine.finished["b"].all_token_ids)
    reclaim(engine, 5)
    use_free_memory(engine)
    asked.clear()
    engine.turn("c", [*context, *prompt(113, 100)], hints=hints("p", last=True))
    assert set(asked) == {"c"}, "its end is below"
    assert engine.moved["tier_bytes:promoted"] == 5 * CHUNK_BYTES


def test_what_an_answer_takes_of_a_pin_is_below_before(make_worker, tiers):
    """Or else what went down before it would be out of reach."""
    engine = make_worker(num_blocks=64, ttl_s=60.0, demote="on-pressure")
    side = engine.connector.side
    step_until(engine, lambda: side.lower.tier.stores_suffixes)
    context = engine.turn("a", prompt(120, 20 * BLOCK), hints=hints("p"))
    (pin,) = side.controller.pins
    whole = pin.kv_blocks
    # Its answer grows into the pin.
    engine.add("runs", prompt(121, 38 * BLOCK), max_tokens=250, hints=hints("old"))
    engine.run()
    assert 0 < pin.kv_blocks < whole - 4
    use_free_memory(engine)
    engine.turn("b", [*context, *prompt(122, 50)], hints=hints("p", last=True))
    given = whole - pin.kv_blocks
    assert engine.moved["tier_bytes:promoted"] == given * CHUNK_BYTES


def give_way_at_once(engine: Worker) -> int:
    """All pins give way to a waiting request; blocks that did not wait for a copy."""
    free = engine.pool.get_num_free_blocks()
    engine.connector.side.controller.memory.reclaim(
        20, Urgency.RUNNING, "runs", mode=ReleaseMode.COPY_FIRST
    )
    return int(engine.pool.get_num_free_blocks() - free)


def test_what_is_below_is_free_at_once(make_worker, tiers):
    engine = make_worker(num_blocks=64, ttl_s=60.0, demote="on-pressure")
    side = engine.connector.side
    step_until(engine, lambda: side.lower.tier.stores_suffixes)
    engine.add("runs", prompt(130, 30 * BLOCK), max_tokens=400, hints=hints("old"))
    engine.step()
    context = engine.turn_beside("free-a", prompt(131, 190), hints=hints("p"))
    reclaim(engine, 20)
    use_free_memory(engine)
    context = engine.turn_beside("free-b", [*context, 5], hints=hints("p"))
    assert give_way_at_once(engine) == 12, "nothing new in whole chunks"
    use_free_memory(engine)
    engine.turn_beside("free-c", [*context, 6], hints=hints("p", last=True))
    assert engine.moved["tier_bytes:promoted"] == 24 * CHUNK_BYTES
    assert engine.moved["tier_bytes:demoted"] == 12 * CHUNK_BYTES


def test_what_was_wrongly_believed_below_is_prefilled_once(make_worker, tiers):
    """LMCache evicts without telling."""
    engine = make_worker(num_blocks=64, ttl_s=60.0, demote="on-pressure")
    side = engine.connector.side
    step_until(engine, lambda: side.lower.tier.stores_suffixes)
    engine.add("runs", prompt(132, 30 * BLOCK), max_tokens=400, hints=hints("old"))
    engine.step()
    request = engine.add("wrong-a", prompt(133, 190), hints=hints("p"))
    step_until(engine, request.is_finished)
    side.lower.tier._stored.found(request.block_hashes, 0, 12 * BLOCK)
    assert give_way_at_once(engine) == 12
    use_free_memory(engine)
    context = [*request.all_token_ids, 5]
    context = engine.turn_beside("wrong-b", context, hints=hints("p"))
    reclaim(engine, 20)
    use_free_memory(engine)
    assert engine.moved["tier_bytes:demoted"] == 12 * CHUNK_BYTES
    assert engine.moved.get("tier_bytes:promoted", 0) == 0
    engine.turn_beside("wrong-c", [*context, 6], hints=hints("p", last=True))
    assert engine.moved["tier_bytes:promoted"] == 12 * CHUNK_BYTES
