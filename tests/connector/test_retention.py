"""The life of a pin on vLLM's real scheduler and block pool.

Blocks hold 16 tokens. The pool has 40 blocks, 39 without vLLM's null block.
"""

from __future__ import annotations

import json

import httpx
import pytest
import vllm

from tests.connector.conftest import FOREVER, expired_pins, free, pinned, totals
from ttlcache.cli.live import engines_of
from ttlcache.programs.divergence import Cause
from ttlcache_connector.role.metrics import _KNOWN_LABELS

PROMPT = list(range(1, 150))  # 149 tokens; with 20 of output 168 have KV: 10 blocks


LAST = {"program_id": "A", "is_last_step": True}


def first_turn(engine, program="A", prompt=PROMPT):
    hints = {"program_id": program, "tool": "bash"}
    return engine.turn(f"{program}-1", prompt, max_tokens=20, hints=hints)


def other_turn(engine, max_tokens=30):
    hints = {"program_id": "B"}
    engine.add("B-1", range(5000, 5040), max_tokens=max_tokens, hints=hints)
    engine.step()


@pytest.mark.parametrize("window", [None, 48])
def test_next_turn_claims_the_pin(make_engine, clock, async_scheduling, window):
    engine = make_engine(
        num_blocks=80, sliding_window=window, async_scheduling=async_scheduling
    )
    context = first_turn(engine)
    held = pinned(engine)
    assert held == 10 if window is None else 10 < held < 20  # and a window's worth
    assert free(engine) == 79 - held
    clock.advance(1.0)
    engine.turn("A-2", context + [7] * 30, hints=LAST)
    counted = totals(engine)
    assert counted["pins:claimed"] == counted["programs_ended:last_step"] == 1
    assert counted["claimed_tokens"] == 160
    assert pinned(engine) == 0
    assert free(engine) == 79


def test_what_a_live_server_tells_is_what_top_and_doctor_expect(make_engine):
    engine = make_engine(num_blocks=40)
    first_turn(engine)
    told = engine.connector.control({"do": "programs"})
    request = httpx.Request("GET", "http://x/ttlcache/programs")
    text = json.dumps({"engines": [told]})
    (read,) = engines_of(httpx.Response(200, text=text, request=request))
    assert read["programs"][0]["pinned_blocks"] == 10
    assert read["gauges"]["pool_blocks"] == 39
    settings = read["settings"]
    assert settings["policy_options"] == {"ttl_s": 5.0}
    # What "auto" stands for here, and no lower tier.
    assert settings["ordering"] == "ttl-aware"
    assert (settings["admission"], settings["lower_tier"]) == ("none", "none")
    assert settings["vllm"] == vllm.__version__


def test_pin_expires_at_its_deadline_and_not_before(make_engine, clock):
    engine = make_engine(num_blocks=40)
    context = first_turn(engine)
    clock.advance(4.9)
    engine.step()
    assert pinned(engine) == 10
    clock.advance(0.2)
    engine.step()
    assert pinned(engine) == 0
    assert free(engine) == 39
    assert expired_pins(engine) == 1
    # It is still found while nobody needs the memory.
    engine.add("A-2", context + [7] * 30, hints={"program_id": "A"})
    assert engine.step().num_scheduled_tokens["A-2"] == len(context) + 30 - 160


def test_balancers_are_told_what_requests_use(make_engine):
    engine = make_engine(num_blocks=40)
    first_turn(engine)
    engine.add("B-1", [*PROMPT[:64], *range(5000, 5020)], hints={"program_id": "B"})
    engine.step()
    assert (pinned(engine), free(engine)) == (10, 39 - 12)
    usage = engine.scheduler.get_kv_cache_usage
    assert usage() == pytest.approx(6 / 39)
    engine.add("C-1", range(9000, 9600), hints={"program_id": "C"})
    engine.step()  # it waits for memory
    assert usage() == pytest.approx(12 / 39)


def test_two_programs_share_a_prefix_and_its_blocks_count_once(make_engine):
    engine = make_engine(num_blocks=60)
    shared = list(range(1, 129))  # 8 blocks
    a = first_turn(engine, "A", shared + [9001] * 32)
    b = first_turn(engine, "B", shared + [9002] * 32)
    # 160 + 19 tokens have KV: 11 blocks each, 8 of them the same ones.
    assert pinned(engine) == 14
    assert free(engine) == 59 - 14
    engine.turn("A-2", [*a, 1, 2, 3], hints=LAST)
    assert pinned(engine) == 11
    engine.turn("B-2", [*b, 1, 2, 3], hints=LAST | {"program_id": "B"})
    assert free(engine) == 59
    assert totals(engine)["pins:claimed"] == 2


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


def test_reset_prefix_cache_succeeds_with_live_pins(make_engine):
    engine = make_engine(num_blocks=40)
    first_turn(engine)
    assert engine.scheduler.reset_prefix_cache() is True
    assert free(engine) == 39
    assert totals(engine)["pins:reset"] == 1
    first_turn(engine)
    other_turn(engine)
    running = {"reset_running_requests": True, "reset_connector": True}
    assert engine.scheduler.reset_prefix_cache(**running)
    engine.run()
    assert "B-1" in engine.finished


# --- what a claim saves against plain vLLM: of a turn of 10 blocks with a hash


def saved(engine):
    counted = totals(engine)
    return counted["claimed_tokens"], counted.get("prefill_tokens_saved", 0)


def next_turn(engine, context, program="A"):
    """Returns the tokens that it found in GPU memory."""
    hints = {"program_id": program, "is_last_step": True}
    engine.add(f"{program}-2", [*context, *[7] * 30], hints=hints)
    (started,) = engine.step().scheduled_new_reqs
    engine.run()
    return started.num_computed_tokens


def take(engine, clock, name, blocks):
    """A request that leaves so many blocks with a hash, and none without."""
    clock.advance(0.1)
    prompt = [1000 + int(name) * 500 + i for i in range(16 * blocks - 1)]
    hints = {"program_id": f"other-{name}", "is_last_step": True}
    engine.turn(name, prompt, max_tokens=2, hints=hints)


@pytest.mark.parametrize(
    ("others", "lost_blocks"),
    [
        ([], 0),
        ([20], 0),  # 19 blocks stood behind it in the queue, and 10 blocks before
        ([15, 14], 0),  # all that stood before it, and no more
        ([15, 15], 1),
        ([15, 15, 4], 5),
        ([15, 15, 15], 10),
    ],
)
def test_a_turn_loses_its_tail_block_by_block(
    make_engine, clock, async_scheduling, others, lost_blocks
):
    """Plain vLLM takes the blocks that stood before it, then the turn's last one.

    The same requests without our connector: what hits there is not saved here.
    """
    hits = {}
    for ours in (False, True):
        engine = make_engine(
            num_blocks=40,
            connector=ours,
            extra_config=FOREVER,
            async_scheduling=async_scheduling,
        )
        if not ours:
            engine.on_step = None
        context = first_turn(engine)
        for number, blocks in enumerate(others):
            take(engine, clock, str(number), blocks)
        hits[ours] = next_turn(engine, context)
    assert hits[True] - hits[False] == 16 * lost_blocks
    claimed, told = saved(engine)
    assert claimed == 160
    assert abs(told - 16 * lost_blocks) < 16


def test_what_others_use_as_well_is_not_saved(make_engine, clock):
    engine = make_engine(num_blocks=60, extra_config=FOREVER)
    shared = list(range(1, 81))  # five blocks
    first_turn(engine, "B", [*shared, *range(6000, 6069)])
    context = first_turn(engine, "A", [*shared, *range(5000, 5069)])
    for number in range(4):
        take(engine, clock, str(number), 25)
    next_turn(engine, context)
    assert saved(engine) == (160, 80)


def test_several_kv_cache_groups_keep_all_or_nothing(make_engine, clock):
    claims = []
    for others in (1, 9):
        engine = make_engine(num_blocks=80, sliding_window=48, extra_config=FOREVER)
        context = first_turn(engine)
        for number in range(others):
            take(engine, clock, str(number), 15)
        next_turn(engine, context)
        claims.append(saved(engine))
    assert claims == [(160, 0), (160, 160)]


# --- clients that change the head of their prompts


SYSTEM = [*range(1000, 1200)]


def converse(engine, session_id: str, *, changes: bool) -> None:
    """Five turns; `changes`: a token more in system text with each of them."""
    history = [*range(300)]
    for number in range(5):
        more = [5] * number if changes else []
        prompt = [*SYSTEM, *more, *range(2000, 2400), *history]
        engine.turn(f"{session_id}-{number}", prompt, session_id=session_id)
        history += range(500, 540)


def test_the_cause_is_logged_once_with_its_remedy(make_engine, our_log):
    engine = make_engine(num_blocks=1000)

    def lines() -> list[str]:
        return [line for line in our_log if "diverged" in line]

    converse(engine, "good", changes=False)
    assert lines() == []
    for name in ("bad", "worse"):
        converse(engine, name, changes=True)
    (line,) = lines()
    assert line.startswith("ttlcache: prompt diverged at token 192 of ")
    assert "CLAUDE_CODE_TOTAL_TOKENS_REMINDER=off" in line
    assert totals(engine)["turns_diverged:head"] == 6
    assert _KNOWN_LABELS["turns_diverged"] == tuple(Cause)


def test_a_step_of_beam_search_is_no_turn(make_engine):
    engine = make_engine()
    engine.turn("cmpl-1-beam-0", PROMPT, max_tokens=1)
    assert pinned(engine) == 0
