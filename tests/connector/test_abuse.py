"""One client with sessions without end: bounded memory, and others hardly notice."""

from __future__ import annotations

import random
import tracemalloc
from functools import lru_cache

import pytest

from bench.stress.abuse.cli import MAX_JCT_RATIO
from bench.stress.abuse.flood import run_arm
from bench.stress.abuse.play import Waits
from tests.connector.conftest import free
from ttlcache.retention import ttl
from ttlcache_connector.role.metrics import _KNOWN_LABELS

SESSIONS = 800


@lru_cache
def played(arm: str, client_ttl_share: float = ttl.CLIENT_TTL_SHARE) -> Waits:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ttl, "CLIENT_TTL_SHARE", client_ttl_share)
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


def test_playing_again_gives_the_same():
    assert run_arm("flood", 60) == run_arm("flood", 60)


def test_an_unknown_arm_is_refused():
    with pytest.raises(ValueError, match="expected one of polite, flood, salts"):
        run_arm("quiet", SESSIONS)


def test_ten_thousand_sessions_of_one_client_leave_memory_bounded(make_engine, clock):
    engine = make_engine(num_blocks=200, extra_config={"policy": "cachettl"})
    engine.on_step = None
    role = engine.role
    role.parts.controller.programs.max_programs = 1000
    rng = random.Random(0)

    def sessions(numbers: range) -> None:
        for number in numbers:
            # New tools until every table of tools is full, then old ones.
            tool = number if number < 6000 else 5500 + number % 500
            hints = {"ttl": 1e9, "tool": f"tool-{tool}"}
            own_id = f"session-{number}"
            if number % 250 == 1:
                own_id += "x" * 1_000_000
            session_id = None
            if number % 2:
                session_id = own_id
            else:
                hints["program_id"] = own_id
            if number % 7 == 0:
                hints[f"key-{number}"] = 1
            prompt = [rng.randrange(30_000) for _ in range(20)]
            engine.add(
                f"r{number}",
                prompt,
                max_tokens=1,
                session_id=session_id,
                hints=hints,
                cache_salt="evil",
            )
            if number % 16 == 0:
                engine.run()
                engine.finished.clear()  # the harness's own memory
                role.reports.take_stats()
                clock.advance(0.1)
        engine.run()
        engine.finished.clear()

    sessions(range(7000))
    labels = set(role.parts.controller.telemetry.metrics.totals)
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
    assert len(role.parts.controller.gaps._windows) <= 4096
    assert len(role.parts.controller.programs) <= 1001
    assert role.parts.controller.requests == {}
    assert set(role.parts.controller.telemetry.metrics.totals) == labels
    known = {str(v) for values in _KNOWN_LABELS.values() for v in values}
    assert {label for _, label in labels if label} <= known | {"forgotten"}
    assert role.parts.faults.total == 0
    engine.scheduler.reset_prefix_cache()
    assert free(engine) == 199
