"""The life of a pin on vLLM's real scheduler and block pool.

Blocks hold 16 tokens. The pool has 40 blocks, 39 without vLLM's null block.
"""

from __future__ import annotations

import json

import httpx
import pytest

from tests.connector.conftest import free, pinned, totals
from ttlcache.cli.live import engines_of

PROMPT = list(range(1, 150))  # 149 tokens; with 20 of output 168 have KV: 10 blocks


def first_turn(engine, program="A", prompt=PROMPT, **hints):
    return engine.turn(
        f"{program}-1",
        prompt,
        max_tokens=20,
        hints={"program_id": program, "tool": "bash", **hints},
    )


def test_next_turn_claims_the_pin(make_engine, clock, async_scheduling):
    engine = make_engine(num_blocks=40, async_scheduling=async_scheduling)
    context = first_turn(engine)
    assert pinned(engine) == 10
    assert free(engine) == 29
    clock.advance(1.0)
    engine.turn(
        "A-2", context + [7] * 30, hints={"program_id": "A", "is_last_step": True}
    )
    assert totals(engine)["pins:claimed"] == 1
    assert totals(engine)["claimed_tokens"] == 160
    assert pinned(engine) == 0
    assert free(engine) == 39


def test_what_a_live_server_tells_is_what_top_and_doctor_expect(make_engine):
    engine = make_engine(num_blocks=40)
    first_turn(engine)
    told = engine.connector.control({"do": "programs"})
    request = httpx.Request("GET", "http://x/ttlcache/programs")
    text = json.dumps({"engines": [told]})
    (read,) = engines_of(httpx.Response(200, text=text, request=request))
    assert read["programs"][0]["pinned_blocks"] == 10
    assert read["gauges"]["pool_blocks"] == 39


def test_pin_expires_at_its_deadline_and_not_before(make_engine, clock):
    engine = make_engine(num_blocks=40)
    first_turn(engine)
    clock.advance(4.9)
    engine.step()
    assert pinned(engine) == 10
    clock.advance(0.2)
    engine.step()
    assert pinned(engine) == 0
    assert free(engine) == 39
    assert totals(engine)["pins:expired"] == 1


def test_expired_kv_is_still_found_while_nobody_needs_the_memory(make_engine, clock):
    engine = make_engine(num_blocks=40)
    context = first_turn(engine)
    clock.advance(6.0)
    engine.step()
    engine.add("A-2", context + [7] * 30, hints={"program_id": "A"})
    assert engine.step().num_scheduled_tokens["A-2"] == len(context) + 30 - 160


def test_last_step_is_not_pinned_and_ends_the_program(make_engine):
    engine = make_engine(num_blocks=40)
    first_turn(engine, is_last_step=True)
    assert pinned(engine) == 0
    assert free(engine) == 39
    assert totals(engine)["programs_ended:last_step"] == 1


def test_pin_is_not_expired_while_its_next_turn_waits(make_engine, clock):
    engine = make_engine(num_blocks=40, max_num_seqs=1)
    context = first_turn(engine)
    engine.add("B-1", range(5000, 5040), max_tokens=30, hints={"program_id": "B"})
    engine.step()
    engine.add("A-2", context + [7] * 30, hints={"program_id": "A"})
    clock.advance(60.0)
    engine.step()
    assert pinned(engine) == 10
    engine.run()
    assert totals(engine)["pins:claimed"] == 1


def test_two_programs_share_a_prefix_and_its_blocks_count_once(make_engine, clock):
    engine = make_engine(num_blocks=60)
    shared = list(range(1, 129))  # 8 blocks
    a = first_turn(engine, "A", shared + [9001] * 32)
    b = first_turn(engine, "B", shared + [9002] * 32)
    # 160 + 19 tokens have KV: 11 blocks each, 8 of them the same ones.
    assert pinned(engine) == 14
    assert free(engine) == 59 - 14
    engine.turn("A-2", [*a, 1, 2, 3], hints={"program_id": "A", "is_last_step": True})
    assert pinned(engine) == 11
    engine.turn("B-2", [*b, 1, 2, 3], hints={"program_id": "B", "is_last_step": True})
    assert free(engine) == 59
    assert totals(engine)["pins:claimed"] == 2


def test_rewritten_history_supersedes_the_tail_and_keeps_the_prefix(make_engine, clock):
    engine = make_engine(num_blocks=40)
    context = first_turn(engine)
    engine.add("A-2", context[:100] + [8] * 60, hints={"program_id": "A"})
    # 100 common tokens are 6 full blocks.
    assert pinned(engine) == 6
    engine.run()
    assert totals(engine)["pins:claimed"] == 1
    program = engine.controller.programs.get(("", "A"))
    assert program.reuse_share == pytest.approx(1 + 0.5 * (6 / 10 - 1))


def test_prefix_inference_needs_no_id(make_engine, clock, async_scheduling):
    engine = make_engine(num_blocks=60, async_scheduling=async_scheduling)
    context = engine.turn("x1", PROMPT, max_tokens=20)
    other = engine.turn("y1", [*PROMPT[:128], *range(7000, 7030)], max_tokens=20)
    clock.advance(0.5)
    engine.turn("x2", context + [7] * 30, max_tokens=4)
    engine.turn("y2", other + [7] * 30, max_tokens=4)
    counted = totals(engine)
    assert counted["turns_identified:prefix"] == 2
    assert counted["turns_identified:new"] == 2
    assert counted["pins:claimed"] == 2


def test_abort_of_a_waiting_turn_gives_the_pin_back_to_its_deadline(make_engine, clock):
    engine = make_engine(num_blocks=40, max_num_seqs=1)
    context = first_turn(engine)
    engine.add("B-1", range(5000, 5040), max_tokens=50, hints={"program_id": "B"})
    engine.step()
    engine.add("A-2", context + [7] * 30, hints={"program_id": "A"})
    engine.abort("A-2")
    engine.step()
    assert pinned(engine) == 10
    engine.add("A-2b", context + [7] * 30, hints={"program_id": "A"})
    engine.run()
    assert totals(engine)["pins:claimed"] == 1


def test_abort_of_a_running_turn_pins_nothing(make_engine, async_scheduling):
    engine = make_engine(num_blocks=40, async_scheduling=async_scheduling)
    engine.add("A-1", PROMPT, max_tokens=50, hints={"program_id": "A"})
    for _ in range(3):
        engine.step()
    engine.abort("A-1")
    engine.run()
    engine.step()
    assert pinned(engine) == 0
    assert free(engine) == 39


def test_reset_prefix_cache_succeeds_with_live_pins(make_engine):
    engine = make_engine(num_blocks=40)
    first_turn(engine)
    assert pinned(engine) == 10
    assert engine.scheduler.reset_prefix_cache() is True
    assert free(engine) == 39
    assert totals(engine)["pins:reset"] == 1


def test_reset_of_running_requests_does_not_raise(make_engine):
    engine = make_engine(num_blocks=60)
    first_turn(engine)
    engine.add("B-1", range(5000, 5040), max_tokens=30, hints={"program_id": "B"})
    engine.step()
    assert engine.scheduler.reset_prefix_cache(
        reset_running_requests=True, reset_connector=True
    )
    engine.run()
    assert "B-1" in engine.finished


def test_hybrid_groups_pin_window_and_full_attention_together(
    make_engine, async_scheduling
):
    engine = make_engine(
        num_blocks=80, sliding_window=48, async_scheduling=async_scheduling
    )
    context = first_turn(engine)
    assert 10 < pinned(engine) < 20  # 10 full-attention blocks and a window's worth
    engine.turn(
        "A-2", context + [7] * 30, hints={"program_id": "A", "is_last_step": True}
    )
    assert totals(engine)["pins:claimed"] == 1
    assert totals(engine)["claimed_tokens"] == 160
    assert free(engine) == 79


def test_policy_none_behaves_like_vllm(make_engine):
    engine = make_engine(num_blocks=40, extra_config={"policy": "none"})
    first_turn(engine)
    assert pinned(engine) == 0


def test_same_tokens_with_and_without_the_connector(make_engine, async_scheduling):
    def outputs(**spec):
        engine = make_engine(num_blocks=24, async_scheduling=async_scheduling, **spec)
        if not spec.get("connector", True):
            engine.on_step = None
        contexts = {p: list(range(100 * p + 1, 100 * p + 90)) for p in range(1, 5)}
        for turn in range(3):
            for program, context in contexts.items():
                engine.add(
                    f"{program}-{turn}",
                    [*context, turn, program],
                    max_tokens=12,
                    hints={"program_id": str(program), "tool": "bash"},
                )
            engine.run()
            for program in contexts:
                done = engine.finished[f"{program}-{turn}"]
                contexts[program] = list(done.all_token_ids)
        return contexts

    assert outputs() == outputs(connector=False, extra_config={})
