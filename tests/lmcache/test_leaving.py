"""The order in which chunks leave L1, kept step by step: right, and cheap."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from functools import partial

import pytest

from tests.lmcache.test_order import L1
from tests.lmcache.test_tier import Key, World
from ttlcache_lmcache.retention.eviction_order import SLICE, Rank, of_unowned
from ttlcache_lmcache.retention.return_estimator import ReturnEstimator


def put_in_order(world: World) -> Iterator[tuple[Rank, str, bool]]:
    """All chunks in L1 with their ranks, by looking at everything.

    True: it is a program's.
    """
    tier, now_s = world.tier, world.clock.now_s()
    book, rank = tier._book, tier._order.rank
    entries = [(rank(each, now_s), each.chain, True) for each in book.programs()]
    for chunk, found in tier._residency._chunks.items():
        if not book.holders(chunk):
            entries.append((of_unowned(found.used[0], now_s), [chunk], False))
    passed: Counter[tuple[str, bytes]] = Counter()
    for at, chain, is_owned in sorted(entries, key=lambda entry: entry[0]):
        for chunk in reversed(chain):
            passed[chunk] += 1
            is_last = passed[chunk] >= len(book.holders(chunk))
            if is_last and tier._residency.has(chunk):
                yield at, chunk[1].decode(), is_owned


@pytest.mark.parametrize("seed", range(4))
def test_the_order_is_the_one_of_looking_at_everything(seed):
    """With no more programs than are ranked at a call."""
    rng = random.Random(seed)
    world = World(max_programs=SLICE)
    contexts = [rng.choice("st") + chr(0x100 + i) for i in range(SLICE + 2)]
    checked = 0
    for step in range(120):
        which, request = rng.randrange(len(contexts)), f"r{step}"
        if len(contexts[which]) > 8:
            contexts[which] = rng.choice(["s", "t", "st"]) + chr(0x200 + step)
        contexts[which] += rng.choice(["", "p", "pq"])
        world.begin(request, contexts[which])
        if rng.random() < 0.3:
            last, ttl_s = rng.random() < 0.3, rng.choice([None, 5.0])
            world.hint(request, is_last_step=last, ttl_s=ttl_s)
        if rng.random() < 0.9:
            world.finish(request, contexts[which] + rng.choice(["", "o"]))
        world.clock.advance(rng.expovariate(1.0))
        world.tier.status()
        expected = list(put_in_order(world))
        ranks = {chunk: rank for rank, chunk, _ in expected}
        owned = {chunk for _, chunk, is_owned in expected if is_owned}
        found = world.order()
        assert len(found) == len(set(found)) == len(ranks)
        # Of chunks that are nobody's any of one moment may go first.
        assert [ranks[each] for each in found] == [rank for rank, _, _ in expected]
        assert [c for c in found if c in owned] == [c for _, c, o in expected if o]
        assert len(found) == len(world.l1)
        checked += len(found) > 10
        # From the front, as evictions go, or anything, as LMCache may.
        gone = found[: rng.choice([0, 1, 4])] or rng.sample(found, min(len(found), 2))
        world.delete([Key(each.encode()) for each in gone])
    assert checked > 30


def test_no_call_ranks_all_programs(monkeypatch):
    """What a call costs does not grow with how many programs there are."""
    l1, rng, ranked, most = L1(2400), random.Random(0), Counter(), Counter()
    worth = ReturnEstimator.worth

    def counted(*args):
        ranked["all"] += 1
        return worth(*args)

    def watched(name, call, *args):
        before = ranked["all"]
        result = call(*args)
        most[name] = max(most[name], ranked["all"] - before)
        return result

    monkeypatch.setattr(ReturnEstimator, "worth", counted)
    for name in ("lookup", "context", "admit", "ended"):
        call = getattr(l1.tier, name)
        monkeypatch.setattr(l1.tier, name, partial(watched, name, call))
    # L1 has room for half of 300 programs behind five system prompts.
    contexts = [chr(0x100 + n % 5) * 8 + chr(0x200 + n) * 4 for n in range(300)]
    for _ in range(1200):
        which = rng.randrange(300)
        l1.serve(contexts[which])
        l1.clock.advance(rng.expovariate(1.0))
        contexts[which] += "grown"[: rng.randrange(6)]
    assert l1.tier.counts["evicted"] > 1000
    # Those in turn, the ones at the front, those that hold the same: not all 300.
    assert 0 < max(most.values()) < 200, most
    assert most["ended"] < 100


def test_who_shares_a_chunk_with_fewer_has_it_to_give():
    """What was in the way of a program is found although that program is gone."""
    world = World(max_programs=2)
    world.turn("r1", "sa")
    world.turn("r2", "sb")
    assert world.order() == ["sb", "sa", "s"]
    world.delete([Key(b"sa"), Key(b"sb")])
    assert world.order() == ["s"]
    world.turn("r3", "x")  # the first of them is forgotten
    assert sorted(world.order()) == ["s", "x"]
