"""500 randomised schedules; `python -m bench wedge` plays as many as you like."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

import ttlcache.retention.reclaim
from bench.stress.wedge import loading
from bench.stress.wedge.run import play, play_alone
from ttlcache.types import Urgency
from ttlcache_connector.blocks import pinned as blocks
from ttlcache_connector.engine.request_view import is_loading
from ttlcache_connector.role.engine_view import Prefills

FIRST_SEED = 1_000_000


#: Fifty schedules each; the first few for every commit.
CHUNKS = [
    pytest.param(chunk, marks=pytest.mark.nightly if chunk >= 4 else ())
    for chunk in range(10)
]


@pytest.mark.parametrize("chunk", CHUNKS)
def test_no_wedge_no_leak_no_broken_invariant(chunk):
    seeds = range(FIRST_SEED + 50 * chunk, FIRST_SEED + 50 * (chunk + 1))
    failures = [o for o in map(play, seeds) if o.failure is not None]
    assert not failures, "\n".join(f"seed {o.seed}: {o.failure}" for o in failures)


#: Seeds in which loads wait for each other; rare since user priority goes first.
LOADS_WAIT = (72, 327, 348)


def failures(seeds: Iterable[int]) -> str:
    found = [o.failure for o in map(play, seeds) if o.failure is not None]
    return "\n".join(found)


def test_the_search_finds_a_wedge(monkeypatch):
    """If pins did not give way when nothing runs, this suite would say so."""
    original = ttlcache.retention.reclaim.Reclaimer.reclaim

    def stubborn(self, needed, urgency, *asker, **how):
        if urgency is Urgency.STALLED:
            return 0
        return original(self, needed, urgency, *asker, **how)

    monkeypatch.setattr(ttlcache.retention.reclaim.Reclaimer, "reclaim", stubborn)
    assert "wedge" in failures(range(30))


@pytest.mark.skipif(not loading.VLLM_COPES, reason="loads wedge this vLLM by itself")
def test_the_search_finds_loads_that_wait_for_each_other(monkeypatch):
    """If those whose KV has arrived still counted as loading, it would say so."""

    def any_load(self):
        return any(map(is_loading, self))

    monkeypatch.setattr(Prefills, "is_loading", any_load)
    assert "wedge" in failures(LOADS_WAIT)


def test_the_search_finds_a_leak(monkeypatch):
    original = blocks.free_tail_first
    monkeypatch.setattr(
        blocks, "free_tail_first", lambda pool, freed: original(pool, freed[:-1])
    )
    assert "references, expected" in failures(range(10))


def test_what_is_left_out_is_played_without_us():
    """Whether vLLM copes is vLLM's; that nothing of ours is in there is not."""
    from bench.stress.wedge.alone import AloneSchedule

    schedule = AloneSchedule(3)
    schedule.start(schedule.draw())
    scheduler = schedule.engine.scheduler
    assert type(scheduler).__module__.startswith("vllm.")
    assert type(scheduler.connector).__name__ == loading.BESIDE.removeprefix("Wedge")
    assert scheduler.kv_cache_config.has_mamba_layers or (
        len(scheduler.kv_cache_config.kv_cache_groups) > 1
    )
    outcomes = [play_alone(seed) for seed in range(12)]
    assert sum(outcome.steps for outcome in outcomes) > 100
