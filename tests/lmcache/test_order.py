"""What L1 keeps: worth from gaps, room at the store."""

from __future__ import annotations

import itertools
import math
import random
from types import SimpleNamespace
from typing import Any

import pytest
from lmcache.v1.distributed.error import L1Error

from tests.curves import kaplan_meier
from tests.lmcache.test_tier import Key, World, hashes_of
from ttlcache_lmcache.adapters.store_gate import StoreGate
from ttlcache_lmcache.retention.residency import chain_of
from ttlcache_lmcache.retention.return_estimator import ReturnCurve


class L1(World):
    """Of `capacity` objects, behind the gate."""

    def __init__(self, capacity: int, *, has_l2: bool = False) -> None:
        super().__init__()
        self.capacity = capacity
        self.locked: set[Key] = set()
        self.errors: list[str] = []
        self.gate = StoreGate(
            self.tier,
            self.delete,
            lambda: has_l2,
            lambda hook, _error: self.errors.append(hook),
        )
        self._numbers = itertools.count()

    def used(self) -> int:
        large = sum(key.chunk_hash[-1:].isupper() for key in self.l1)
        return len(self.l1) + 15 * large

    def usage(self) -> float:
        return self.used() / self.capacity

    def is_evictable(self, key: Key) -> bool:
        return key in self.l1 and key not in self.locked

    def store(self, keys: list[Key]) -> dict[Key, int]:
        return self.gate.store(keys, self.reserve)

    def reserve(self, keys: list[Key]) -> dict[Key, int]:
        """As LMCache's storage manager, above the gate before its L1."""
        found = self.gate.with_room(keys, self.reserve_in_l1)
        return {key: 1 for key in keys if found[key][0] == L1Error.SUCCESS}

    def reserve_in_l1(self, keys: list[Key]) -> dict[Key, tuple[L1Error, None]]:
        """As LMCache: all new ones, or none where they do not fit."""
        before = dict(self.l1)
        new = [key for key in keys if key not in before]
        self.l1.update(dict.fromkeys(new))
        found = dict.fromkeys(keys, (L1Error.KEY_NOT_WRITABLE, None))
        if self.used() > self.capacity:
            self.l1 = before
            return found | dict.fromkeys(new, (L1Error.OUT_OF_MEMORY, None))
        self.tier.reserved(new)
        self.tier.written(new)
        return found | dict.fromkeys(new, (L1Error.SUCCESS, None))

    def look_up(self, context: str) -> tuple[str, int]:
        """A request; how many of its chunks L1 has."""
        keys, request = self.keys(context), f"r{next(self._numbers)}"
        hits = next((i for i, k in enumerate(keys) if k not in self.l1), len(keys))
        self.begin(request, context)
        return request, hits

    def serve(
        self, context: str, output: str = "", took_s: float = 0.1, **hint: Any
    ) -> int:
        """A turn; its hits."""
        request, hits = self.look_up(context)
        self.clock.advance(took_s)
        keys = self.keys(context + output)
        self.store(keys[hits:])
        self.tier.context(keys)
        if hint:
            self.hint(request, **hint)
        self.tier.ended(request)
        return hits

    def held(self) -> set[str]:
        return {key.chunk_hash.decode() for key in self.l1}


# worth


def test_the_worth_of_waiting_is_the_discounted_return():
    """Against the sum written out, on random gaps of which some never ended."""
    rng = random.Random(1)
    gaps = [rng.expovariate(0.5) for _ in range(200)]
    ended = [rng.random() < 0.8 for _ in gaps]
    curve = kaplan_meier(gaps, ended)
    horizon_s = 3.0
    drawn = ReturnCurve(curve, horizon_s)
    for waited_s in (0.0, 0.5, 2.0, 5.0):
        expected, before = 0.0, curve.at(waited_s)
        for time, left in zip(curve.times, curve.survival, strict=True):
            if time > waited_s:
                discount = math.exp(-(time - waited_s) / horizon_s)
                expected += (before - left) * discount
                before = left
        assert drawn.after(waited_s) == pytest.approx(expected / curve.at(waited_s))


def test_long_silence_is_worth_nothing_and_overflows_nothing():
    drawn = ReturnCurve(kaplan_meier([1.0, 2.0, 3000.0], [True, True, True]), 0.01)
    assert drawn.after(0.0) < 1e-40
    assert drawn.after(2999.999) == pytest.approx(math.exp(-0.1))
    assert drawn.after(3000.0) == drawn.after(1e9) == 0.0


def test_a_long_curve_is_thinned_and_still_right():
    gaps = [0.001 * i for i in range(1, 20_001)]
    drawn = ReturnCurve(kaplan_meier(gaps, [True] * len(gaps)), 10.0)
    # T uniform on (0, 20]: E[exp(-T / 10)] = (1 - exp(-2)) / 2.
    assert drawn.after(0.0) == pytest.approx((1 - math.exp(-2)) / 2, rel=0.01)


# admission


def test_contexts_that_take_turns_do_not_push_each_other_out():
    l1 = L1(8)
    hits = [0, 0, 0]
    for round_ in range(30):
        for name in "abcd":  # 16 chunks, places for 8
            hits[round_ // 10] += l1.serve(name + "...")
            l1.clock.advance(1.0)
    # Last use would hit nothing at all: each is gone just before it is wanted.
    assert hits[2] >= 0.4 * 10 * 16
    assert len(l1.l1) <= 8


def test_what_never_returns_gives_way_though_nobody_says_that_it_ended():
    l1 = L1(12)
    for program in range(30):
        context = chr(0x100 + program) + "..."
        for _ in range(6):
            hits = l1.serve(context)
            l1.clock.advance(0.5)
        assert program < 3 or hits == 4, program


def test_a_finished_program_gives_way_at_once():
    l1 = L1(4)
    l1.serve("ab")
    l1.serve("xy", is_last_step=True)
    assert l1.held() == {"a", "ab", "x", "xy"}  # full to the last object
    l1.serve("pq")
    assert l1.held() == {"a", "ab", "p", "pq"}


def test_a_clients_ttl_outlasts_everybody():
    l1 = L1(4)
    l1.serve("abcd", ttl_s=50.0)
    for _ in range(5):
        assert l1.serve("xy") == 0
        l1.clock.advance(1.0)
    assert l1.held() == {"a", "ab", "abc", "abcd"}
    l1.clock.advance(60.0)
    l1.serve("xy")
    assert l1.held() == {"a", "ab", "x", "xy"}  # the tail went


def test_a_load_of_larger_objects_than_there_are_finds_room():
    """Two models in one L1; loads from L2 ask L1 itself."""
    l1 = L1(640, has_l2=True)
    for name in range(640):
        l1.serve(chr(0x100 + name))
    keys = l1.keys("ABC")
    found = l1.gate.with_room(keys, l1.reserve_in_l1)
    assert [error for error, _ in found.values()] == [L1Error.SUCCESS] * 3
    assert 576 < l1.used() <= 640  # more than nine tenths


def test_a_load_that_is_larger_than_what_is_free_finds_room():
    """L1 is no more than three quarters full, but LMCache reserves all or nothing."""
    l1 = L1(100, has_l2=True)
    for name in range(75):
        l1.serve(chr(0x100 + name))
    keys = l1.keys("".join(chr(0x200 + index) for index in range(30)))
    found = l1.gate.with_room(keys, l1.reserve_in_l1)
    assert [error for error, _ in found.values()] == [L1Error.SUCCESS] * 30


def test_after_a_fault_lmcache_evicts_by_itself_again(monkeypatch):
    l1 = L1(4)
    controller = SimpleNamespace(_eviction_policy="LRU")
    storage = SimpleNamespace(
        reserve_write=lambda keys, _: l1.reserve(keys),
        _eviction_controllers=[controller],
    )
    l1.gate.install(storage, SimpleNamespace(reserve_write=None))
    assert storage.reserve_write(l1.keys("a"), None)
    assert controller._eviction_policy != "LRU"
    monkeypatch.setattr(l1.tier, "admit", None)
    assert storage.reserve_write(l1.keys("b"), None)
    assert controller._eviction_policy == "LRU"
    assert l1.errors == ["admission"]


def test_what_is_locked_stays_and_the_store_takes_what_fits():
    l1 = L1(4)
    l1.serve("abcd", is_last_step=True)
    l1.locked = set(l1.keys("abc"))
    l1.serve("xyz")
    assert l1.held() == {"a", "ab", "abc", "x"}


def test_after_a_refusal_nothing_behind_it_is_taken_in_this_turn():
    l1 = L1(4)
    l1.serve("abcd", ttl_s=50.0)
    request, _ = l1.look_up("xyz")
    assert l1.store(l1.keys("xy")) == {}
    l1.delete(l1.keys("abcd")[3:])  # one place is free, and "xyz" alone is no use
    assert list(l1.store(l1.keys("xyz")[1:])) == []
    l1.tier.ended(request)
    l1.look_up("xyz")
    assert list(l1.store(l1.keys("xyz"))) == l1.keys("x")


def test_a_gate_that_fails_lets_the_store_through():
    l1 = L1(4)
    l1.tier.admit = lambda *_: 1 / 0
    assert len(l1.store(l1.keys("ab"))) == 2
    assert l1.errors == ["admission"]


def test_memory_in_pieces_costs_the_tail_only():
    """L1 says that there is room, but LMCache cannot allocate so much at once."""
    l1 = L1(100)
    l1.serve("a")
    real = l1.reserve
    l1.reserve = lambda keys: {} if len(keys) > 2 else real(keys)
    assert list(l1.store(l1.keys("vwxyz"))) == l1.keys("vw")
    assert l1.held() == {"a", "v", "vw"}


class TwoSizes(L1):
    """Objects of the model "big" take 40 times as much as those of "m"."""

    def used(self) -> int:
        return sum(40 if key.model_name == "big" else 1 for key in self.l1)

    def store_big(self, context: str) -> int:
        hashes = hashes_of(context)
        self.tier.lookup(context, chain_of("big", "", hashes), len(context))
        stored = self.store([Key(chunk, "big") for chunk in hashes])
        self.tier.context(list(stored))
        self.tier.ended(context)
        self.clock.advance(1.0)
        return len(stored)


@pytest.mark.parametrize("has_l2", [False, True])
def test_large_objects_find_room_behind_small_ones(has_l2):
    """A few small ones fewer leave room for none of the large ones."""
    l1 = TwoSizes(1000, has_l2=has_l2)
    for index in range(130):
        l1.serve(chr(0x100 + index) * 8, is_last_step=True)
    assert l1.used() > 990
    stored = [l1.store_big(chr(0x400 + index) * 2) for index in range(5)]
    assert stored == [2] * 5
    assert 900 <= l1.used() <= 1000
    assert l1.errors == []


def test_a_store_whose_room_was_deleted_for_another_one_finds_other_room():
    """Two stores at once are named the same; the later one asks again."""
    l1 = L1(4)
    l1.serve("abcd", is_last_step=True)
    real, taken = l1.tier.admit, []

    def at_once(*args):
        found = real(*args)
        if not taken:
            taken.append(True)
            l1.store([Key(b"p")])
        return found

    l1.tier.admit = at_once
    assert list(l1.store([Key(b"q")])) == [Key(b"q")]
    assert l1.held() == {"a", "ab", "p", "q"}
    assert l1.errors == []


def test_what_is_worth_more_does_not_leave_for_large_objects():
    l1 = TwoSizes(1000)
    l1.serve("a" * 995, ttl_s=50.0)
    assert l1.store_big("xy") == 0
    assert len(l1.l1) == 995


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("has_l2", [False, True])
def test_the_budget_holds_and_no_prefix_is_missing_a_chunk(seed, has_l2):
    rng = random.Random(seed)
    l1 = L1(20, has_l2=has_l2)
    contexts = [rng.choice("st") + chr(0x100 + i) for i in range(8)]
    for _ in range(200):
        which = rng.randrange(len(contexts))
        if len(contexts[which]) > 10:
            contexts[which] = "s" + chr(0x200 + rng.randrange(1000))
        contexts[which] += rng.choice(["", "p", "pq"])
        l1.serve(contexts[which], rng.choice(["", "o"]), rng.random())
        l1.clock.advance(rng.expovariate(1.0))
        assert len(l1.l1) <= 20
        if has_l2:
            continue  # the store of an unknown may take what lies before it
        held = l1.held()
        # An old answer that did not come back is nobody's, and goes a little later.
        orphans = [key for key in held if len(key) > 1 and key[:-1] not in held]
        assert not any(l1.tier._book.holders(("m", key.encode())) for key in orphans)
    assert l1.errors == []
