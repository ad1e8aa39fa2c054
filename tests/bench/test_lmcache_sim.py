"""LMCache's L1 in virtual time: who keeps what."""

from __future__ import annotations

import pytest

pytest.importorskip("lmcache")

from bench.lmcache.sim import Simulation
from ttlcache_sim.load.programs import Program, Turn

CHUNK = 64
ARMS = ("LRU", "ARC", "ttl")


def takes_turns(programs: int, turns: int, gap_s: float) -> tuple[Program, ...]:
    """Programs of ten chunks that all wait for as long."""
    return tuple(
        Program(
            f"p{index}",
            index * 0.9,
            (Turn(10 * CHUNK, 4, "t", gap_s), *[Turn(8, 4, "t", gap_s)] * (turns - 1)),
        )
        for index in range(programs)
    )


def test_where_contexts_take_turns_ours_keeps_some_and_never_more_than_fits():
    programs = takes_turns(10, 8, 10.0)
    hit = {}
    for arm in ARMS:
        sim = Simulation(arm, 50, CHUNK)
        hit[arm] = sim.run(programs, 0, 1.0).prompt_hit
        assert len(sim.l1) <= 50
    assert hit["ttl"] > max(0.3, 1.5 * hit["LRU"], 1.5 * hit["ARC"])


@pytest.mark.parametrize("arm", ARMS)
def test_what_was_evicted_while_its_request_ran_is_not_written_again(arm):
    """A store begins where the lookup's hit ended."""
    sim = Simulation(arm, 50, CHUNK)
    tokens = list(range(3 * CHUNK))
    sim.begin("r1", tokens)
    sim.end("r1", tokens)
    sim.begin("r2", tokens)
    sim.l1.clear()
    sim.end("r2", [*tokens, *range(CHUNK)])
    assert sim.l1 == {sim.keys([*tokens, *range(CHUNK)])[3]}


def test_what_the_pool_has_counts_once():
    programs = takes_turns(1, 4, 1.0)
    alone = Simulation("LRU", 50, CHUNK).run(programs, 0, 1.0)
    both = Simulation("LRU", 50, CHUNK, pool_chunks=50).run(programs, 0, 1.0)
    neither = Simulation("LRU", 1, CHUNK, pool_chunks=50).run(programs, 0, 1.0)
    assert alone.cached_tokens == both.cached_tokens == neither.cached_tokens > 0
    assert (alone.pool_tokens, both.pool_tokens) == (0, both.cached_tokens)
