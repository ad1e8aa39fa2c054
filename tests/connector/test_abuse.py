"""One client with sessions without end: bounded memory, and others hardly notice."""

from __future__ import annotations

import random
import tracemalloc
from dataclasses import replace
from functools import lru_cache

import pytest

from bench.stress.abuse.cli import MAX_JCT_RATIO, MAX_P99_RATIO
from bench.stress.abuse.flood import run_arm
from bench.stress.abuse.patterns import patterns
from bench.stress.abuse.play import Load, Waits, compare
from tests.connector.conftest import free
from tests.labels import TOOL_CLASSES, UNFIT_REASONS
from ttlcache.programs.divergence import Cause
from ttlcache.retention import decisions
from ttlcache.types import IdentityRule, PinOutcome

SESSIONS = 800
#: No label that a client made up.
LABELS = {
    *(*PinOutcome, *IdentityRule, *Cause, *UNFIT_REASONS, "unknown_key", "not_a_dict"),
    *("last_step", "told", "idle", "forgotten"),
    *(f"{tool}/{outcome}" for tool in TOOL_CLASSES for outcome in PinOutcome),
}


@lru_cache
def played(arm: str, client_ttl_share: float = decisions.CLIENT_TTL_SHARE) -> Waits:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decisions, "CLIENT_TTL_SHARE", client_ttl_share)
        return run_arm(arm, SESSIONS)


@pytest.mark.parametrize("arm", ["flood", "salts"])
def test_a_flood_hardly_slows_another_tenant_down(arm):
    polite, flooded = played("polite"), played(arm)
    assert polite.programs == flooded.programs == 20
    assert flooded.peak_pinned_blocks > 200, "nothing was pinned: no flood"
    assert polite.hook_errors == flooded.hook_errors == 0
    assert flooded.mean_jct_s <= MAX_JCT_RATIO * polite.mean_jct_s
    assert flooded.hit_share >= 0.75 * polite.hit_share


def test_it_would_without_the_bound_on_wishes():
    unbounded = played("flood", client_ttl_share=1.0)
    assert unbounded.hit_share < 0.5 * played("flood").hit_share
    assert unbounded.mean_jct_s > 1.1 * played("polite").mean_jct_s


def test_contexts_that_grow_without_end_hardly_slow_agents_down():
    load = Load(agents=12, give_up_s=200.0)
    pattern = replace(patterns(load.seats)["endless contexts"], clients=48)
    found = compare(pattern, load, tenants=1, policies=["adaptive"])
    mean, p99, _ = found.ratios("adaptive")
    assert found.by_policy["adaptive"].hook_errors == 0
    assert mean <= MAX_JCT_RATIO
    assert p99 <= MAX_P99_RATIO


def test_one_long_answer_does_not_keep_newcomers_out():
    """Something always runs then, though the engine has time for more."""
    load = Load(agents=60, agents_a_s=1.0, give_up_s=200.0)
    pattern = patterns(load.seats)["long answers"]
    found = compare(pattern, load, tenants=1, policies=["adaptive"])
    assert found.ratios("adaptive")[0] <= 1.05


def test_playing_again_gives_the_same_and_an_unknown_arm_is_refused():
    assert run_arm("flood", 60) == run_arm("flood", 60)
    with pytest.raises(ValueError, match="expected one of polite, flood, salts"):
        run_arm("quiet", SESSIONS)


def test_a_pin_frees_nothing_before_a_longer_one_with_the_same_beginning(make_engine):
    engine = make_engine(num_blocks=200)
    context = engine.turn("a", range(100), hints={"program_id": "a"})
    engine.turn("b", [*context, *range(500, 600)], hints={"program_id": "b"})
    shorter, longer = sorted(engine.controller.pins, key=lambda pin: pin.kv_blocks)
    assert not engine.holder.is_freeable(shorter.pin_id)
    assert engine.holder.is_freeable(longer.pin_id)


@pytest.mark.parametrize("tier", [{}, {"lower_tier": "cpu", "cpu_gb": 0.001}])
def test_requests_with_the_same_blocks_are_few_pins(make_engine, clock, tier):
    """Anybody can send thousands of them a minute, all in the cache: each pin costs
    time when memory gets short."""
    engine = make_engine(num_blocks=200, extra_config=tier)
    for number in range(100):
        engine.turn(f"r{number}", [*range(300), number], max_tokens=2)
        clock.advance(0.1)
    parts = engine.role.parts
    assert 1 <= len(parts.controller.pins) <= 10
    if tier:
        assert parts.above_tier is not None
        assert not parts.above_tier.unpinned


def test_ten_thousand_sessions_of_one_client_leave_memory_bounded(make_engine, clock):
    engine = make_engine(num_blocks=200, extra_config={"policy": "cachettl"})
    engine.on_step = None
    role = engine.role
    controller = role.parts.controller
    controller.programs.max_programs = 1000
    rng = random.Random(0)

    def sessions(numbers: range) -> None:
        for number in numbers:
            # New tools until every table of tools is full, then old ones.
            tool = number if number < 6000 else 5500 + number % 500
            hints = {"ttl": 1e9, "tool": f"tool-{tool}"}
            own_id = f"session-{number}"
            if number % 250 == 1:
                own_id += "x" * 1_000_000
            if number % 2 == 0:
                hints["program_id"] = own_id
            if number % 7 == 0:
                hints[f"key-{number}"] = 1
            engine.add(
                f"r{number}",
                [rng.randrange(30_000) for _ in range(20)],
                max_tokens=1,
                session_id=own_id if number % 2 else None,
                hints=hints,
                cache_salt="evil",
            )
            if number % 16 == 0:
                engine.run()
                engine.finished.clear()  # the harness's own memory
                role.status.take_stats()
                clock.advance(0.1)
        engine.run()
        engine.finished.clear()

    sessions(range(7000))
    labels = set(controller.telemetry.metrics.totals)
    tracemalloc.start()
    try:
        sessions(range(7000, 8500))
        middle, _ = tracemalloc.get_traced_memory()
        sessions(range(8500, 10_000))
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # The program table turned over before the first look; rings of gaps still fill.
    # 1,500 sessions, of which six have ids of a megabyte.
    assert after - middle < 600_000
    assert len(controller.gaps._windows) <= 4096
    assert len(controller.programs) <= 1001
    assert controller.requests == {}
    assert set(controller.telemetry.metrics.totals) == labels
    assert {label for _, label in labels if label} <= LABELS
    assert role.parts.faults.total == 0
    engine.scheduler.reset_prefix_cache()
    assert free(engine) == 199
