"""What is stored while its next turn waits, and what is known to be stored."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.e2e.tier_bytes.worker import (
    BLOCK,
    CHUNK_BYTES,
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
    role = engine.connector.scheduler_role
    # Its pin is whole when it comes: it would not ask.
    role.requests.stored_tokens = lambda request: math.inf
    lookup = role.parts.lower.tier._adapter.check_lookup_result

    def give_way(copies: int) -> None:
        reclaimed = role.parts.controller.memory.reclaim(
            12, Urgency.RUNNING, "runs", mode=ReleaseMode.COPY_FIRST
        )
        assert reclaimed > 0
        totals = role.parts.controller.telemetry.metrics.totals
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
    role.upkeep.release_all()
    engine.settle()
    assert tiers.clear_cpu()  # what either lookup found is not locked


def test_a_turn_whose_context_is_pinned_as_a_whole_asks_nothing(make_worker, tiers):
    """What follows it was never computed before: it begins in the step it came."""
    engine = make_worker(num_blocks=64, ttl_s=60.0, demote="on-pressure")
    half = engine.connector.scheduler_role.parts.lower.tier
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
