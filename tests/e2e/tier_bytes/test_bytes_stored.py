"""What is stored while its next turn waits, and what is known to be stored."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.lora.request import LoRARequest

from tests.e2e.tier_bytes.worker import (
    CHUNK_BYTES,
    Worker,
    hints,
    prompt,
    reclaim,
    use_free_memory,
)
from ttlcache.estimators.costs import MIN_LOST

pytestmark = pytest.mark.e2e


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


# --- how far the tier is believed, learnt of what comes back


PROGRAMS = 2 * MIN_LOST


def test_returns_tell_what_the_tier_keeps(make_worker, two_block_tiers):
    """Chunks are of two blocks: a tail that fills none is not held against it."""
    engine: Worker = make_worker(num_blocks=200, tiers=two_block_tiers)
    controller = engine.connector.scheduler_role.parts.controller
    totals = controller.telemetry.metrics.totals
    contexts = [
        engine.turn(f"first-{i}", prompt(500 + i, 200), hints=hints(f"kept-{i}"))
        for i in range(PROGRAMS)
    ]
    engine.settle()
    use_free_memory(engine)
    contexts = _return(engine, "second", contexts)
    engine.settle()
    assert totals["reloads", "lmcache"] == PROGRAMS
    assert controller.costs.kept_share == 1.0

    use_free_memory(engine)
    assert two_block_tiers.clear_cpu()  # it had room for nobody
    _return(engine, "third", contexts)
    engine.settle()
    assert totals["reloads", "lmcache"] == PROGRAMS
    assert controller.costs.kept_share == pytest.approx(0.5, abs=0.05)
    # A newcomer finds nothing either, which says nothing of the tier.
    before = controller.costs.kept_share
    engine.turn("new", prompt(600, 200), hints=hints("kept-new"))
    assert controller.costs.kept_share == before


CASES = ["malformed hints", "an adapter", "all to compute", "short", "reset"]


@pytest.mark.parametrize("case", CASES)
def test_what_the_tier_never_had_or_is_not_asked_for_tells_nothing(
    make_worker, two_block_tiers, case
):
    engine: Worker = make_worker(num_blocks=200, tiers=two_block_tiers)
    controller = engine.connector.scheduler_role.parts.controller
    wishes = {"ttl": -1} if case == "malformed hints" else {}
    lora = LoRARequest("adapter", 1, "nowhere") if case == "an adapter" else None
    seed = 1000 * (1 + CASES.index(case))  # none has another's tokens
    length = 20 if case == "short" else 200

    def turn(name: str, i: int, tokens: list[int]) -> list[int]:
        request = engine.add(
            f"{name}-{i}", tokens, hints=hints(f"kept-{i}") | wishes, lora_request=lora
        )
        request.skip_reading_prefix_cache = case == "all to compute"
        engine.run()
        return list(request.all_token_ids)

    contexts = [turn("a", i, prompt(seed + i, length)) for i in range(PROGRAMS)]
    engine.settle()
    if case == "reset":
        assert engine.connector.reset_cache()
    use_free_memory(engine)
    for i, context in enumerate(contexts):
        turn("b", i, [*context, 5])
    engine.settle()
    totals = controller.telemetry.metrics.totals
    assert totals["evicted_returns", ""] == PROGRAMS
    assert totals["reloads", "lmcache"] == 0
    assert controller.costs.kept_share == 1.0


def _return(engine: Worker, name: str, contexts: list[list[int]]) -> list[list[int]]:
    return [
        engine.turn(f"{name}-{i}", [*context, 5], hints=hints(f"kept-{i}"))
        for i, context in enumerate(contexts)
    ]
