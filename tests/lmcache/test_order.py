"""What L1 keeps: worth from gaps, room at the store."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from tests.curves import kaplan_meier
from tests.lmcache.test_tier import Key
from ttlcache.clock import VirtualClock
from ttlcache_lmcache.adapters.store_gate import StoreGate
from ttlcache_lmcache.config import ServerModuleConfig, load
from ttlcache_lmcache.hints import Hint
from ttlcache_lmcache.retention.l1_tier import Tier
from ttlcache_lmcache.retention.return_estimator import ReturnCurve


class L1:
    """An L1 of `capacity` objects behind the gate; contexts are one chunk a letter."""

    def __init__(self, capacity: int, *, has_l2: bool = False, **config: Any) -> None:
        self.clock = VirtualClock(1000.0)
        self.capacity = capacity
        self.keys: dict[Key, None] = {}
        self.locked: set[Key] = set()
        self.errors: list[str] = []
        self.tier = Tier(
            load(ServerModuleConfig, config, "test"),
            self.clock,
            lambda: len(self.keys) / capacity,
            lambda key: key in self.keys and key not in self.locked,
        )
        self.gate = StoreGate(
            self.tier,
            self.delete,
            lambda: has_l2,
            lambda hook, _error: self.errors.append(hook),
        )
        self._numbers = iter(range(1_000_000))

    def store(self, keys: list[Key]) -> dict[Key, int]:
        return self.gate.store(keys, self.reserve)

    def reserve(self, keys: list[Key]) -> dict[Key, int]:
        """As LMCache: all new ones, or none where they do not fit."""
        new = [key for key in keys if key not in self.keys]
        if len(self.keys) + len(new) > self.capacity:
            return {}
        self.keys.update(dict.fromkeys(new))
        self.tier.reserved(new)
        self.tier.written(new)
        return dict.fromkeys(new, 1)

    def delete(self, keys: list[Key]) -> int:
        for key in keys:
            del self.keys[key]
        self.tier.deleted(keys)
        return len(keys)

    def chain(self, context: str) -> list[Key]:
        return [Key(context[:end].encode()) for end in range(1, len(context) + 1)]

    def begin(self, context: str) -> tuple[str, int]:
        """A request; how many of its chunks L1 has."""
        chain, request = self.chain(context), f"r{next(self._numbers)}"
        hashes = [key.chunk_hash for key in chain]
        hits = next((i for i, k in enumerate(chain) if k not in self.keys), len(chain))
        self.tier.lookup(request, "m", hashes, len(context))
        return request, hits

    def turn(self, context: str, output: str = "", took_s: float = 0.1) -> int:
        request, hits = self.begin(context)
        self.clock.advance(took_s)
        chain = self.chain(context + output)
        self.store(chain[hits:])
        self.tier.context(chain)
        self.tier.ended(request)
        return hits

    def held(self) -> set[str]:
        return {key.chunk_hash.decode() for key in self.keys}


# worth


def test_the_worth_of_waiting_is_the_discounted_return() -> None:
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


def test_long_silence_is_worth_nothing_and_overflows_nothing() -> None:
    drawn = ReturnCurve(kaplan_meier([1.0, 2.0, 3000.0], [True, True, True]), 0.01)
    assert drawn.after(0.0) < 1e-40
    assert drawn.after(2999.999) == pytest.approx(math.exp(-0.1))
    assert drawn.after(3000.0) == drawn.after(1e9) == 0.0


def test_a_long_curve_is_thinned_and_still_right() -> None:
    gaps = [0.001 * i for i in range(1, 20_001)]
    drawn = ReturnCurve(kaplan_meier(gaps, [True] * len(gaps)), 10.0)
    # T uniform on (0, 20]: E[exp(-T / 10)] = (1 - exp(-2)) / 2.
    assert drawn.after(0.0) == pytest.approx((1 - math.exp(-2)) / 2, rel=0.01)


# admission


def test_l1_may_be_full_to_the_last_object() -> None:
    l1 = L1(4)
    l1.turn("ab")
    l1.turn("xy")
    assert l1.held() == {"a", "ab", "x", "xy"}


def test_contexts_that_take_turns_do_not_push_each_other_out() -> None:
    l1 = L1(8)
    contexts = {name: name + "." * 3 for name in "abcd"}  # 16 chunks, places for 8
    hits = [0, 0, 0]
    for round_ in range(30):
        for name in contexts:
            hits[round_ // 10] += l1.turn(contexts[name])
            l1.clock.advance(1.0)
    # Last use would hit nothing at all: each is gone just before it is wanted.
    assert hits[2] >= 0.4 * 10 * 16
    assert len(l1.keys) <= 8


def test_what_never_returns_gives_way_though_nobody_says_that_it_ended() -> None:
    l1 = L1(12)
    for program in range(30):
        context = chr(0x100 + program) + "..."
        for _ in range(6):
            hits = l1.turn(context)
            l1.clock.advance(0.5)
        assert program < 3 or hits == 4, program


def test_a_finished_program_gives_way_at_once() -> None:
    l1 = L1(4)
    l1.turn("ab")
    request, _ = l1.begin("xy")
    l1.store(l1.chain("xy"))
    l1.tier.hint(Hint(request_id=request, is_last_step=True))
    l1.tier.ended(request)
    l1.turn("pq")
    assert l1.held() == {"a", "ab", "p", "pq"}


def test_a_clients_ttl_outlasts_everybody() -> None:
    l1 = L1(4)
    request, _ = l1.begin("abcd")
    l1.store(l1.chain("abcd"))
    l1.tier.hint(Hint(request_id=request, ttl_s=50.0))
    l1.tier.ended(request)
    for _ in range(5):
        assert l1.turn("xy") == 0
        l1.clock.advance(1.0)
    assert l1.held() == {"a", "ab", "abc", "abcd"}
    l1.clock.advance(60.0)
    l1.turn("xy")
    assert l1.held() == {"a", "ab", "x", "xy"}  # the tail went


def test_what_is_locked_stays_and_the_store_takes_what_fits() -> None:
    l1 = L1(4)
    l1.turn("abcd")
    l1.tier.hint(Hint(request_id="r0", is_last_step=True))
    l1.locked = set(l1.chain("abc"))
    l1.turn("xyz")
    assert l1.held() == {"a", "ab", "abc", "x"}


def test_after_a_refusal_nothing_behind_it_is_taken_in_this_turn() -> None:
    l1 = L1(4)
    request, _ = l1.begin("abcd")
    l1.store(l1.chain("abcd"))
    l1.tier.hint(Hint(request_id=request, ttl_s=50.0))
    l1.tier.ended(request)
    request, _ = l1.begin("xyz")
    assert l1.store(l1.chain("xy")) == {}
    l1.delete(l1.chain("abcd")[3:])  # one place is free, and "xyz" alone is no use
    assert list(l1.store(l1.chain("xyz")[1:])) == []
    l1.tier.ended(request)
    request, _ = l1.begin("xyz")
    assert list(l1.store(l1.chain("xyz"))) == l1.chain("x")


def test_with_l2_nothing_is_refused() -> None:
    l1 = L1(4, has_l2=True)
    request, _ = l1.begin("abcd")
    l1.store(l1.chain("abcd"))
    l1.tier.hint(Hint(request_id=request, ttl_s=50.0))
    l1.tier.ended(request)
    l1.turn("xy")
    assert l1.held() == {"a", "ab", "x", "xy"}


def test_a_load_from_l2_finds_room_however_full_l1_is() -> None:
    for has_l2 in (True, False):  # without L2 nothing is loaded
        l1 = L1(4, has_l2=has_l2)
        l1.turn("abcd")
        l1.begin("xyz")
        l1.gate.make_room(l1.chain("xyz"))
        assert len(l1.reserve(l1.chain("xyz"))) == (3 if has_l2 else 0)
        assert l1.errors == []


def test_a_gate_that_fails_lets_the_store_through() -> None:
    l1 = L1(4)
    l1.tier.admit = lambda *_: 1 / 0  # type: ignore[method-assign]
    assert len(l1.store(l1.chain("ab"))) == 2
    assert l1.errors == ["admission"]


def test_memory_in_pieces_costs_the_tail_only() -> None:
    """L1 says that there is room, but LMCache cannot allocate so much at once."""
    l1 = L1(100)
    l1.turn("a")
    real = l1.reserve
    l1.reserve = lambda keys: {} if len(keys) > 2 else real(keys)  # type: ignore[method-assign]
    assert list(l1.store(l1.chain("vwxyz"))) == l1.chain("vw")
    assert l1.held() == {"a", "v", "vw"}


class TwoSizes(L1):
    """Objects of the model "big" take 40 times as much as those of "m"."""

    def __init__(self, capacity: int, **config: Any) -> None:
        super().__init__(capacity, **config)
        self.tier._usage = lambda: self.used() / capacity

    def used(self) -> int:
        return sum(40 if key.model_name == "big" else 1 for key in self.keys)

    def reserve(self, keys: list[Key]) -> dict[Key, int]:
        before = dict(self.keys)
        self.keys.update(dict.fromkeys(keys))
        fits, self.keys = self.used() <= self.capacity, before
        real, self.capacity = self.capacity, len(before) + len(keys)
        found = super().reserve(keys) if fits else {}
        self.capacity = real
        return found

    def store_big(self, context: str) -> int:
        chain = [Key(key.chunk_hash, "big") for key in self.chain(context)]
        hashes = [key.chunk_hash for key in chain]
        self.tier.lookup(context, "big", hashes, len(context))
        stored = self.store(chain)
        self.tier.context(list(stored))
        self.tier.ended(context)
        self.clock.advance(1.0)
        return len(stored)


@pytest.mark.parametrize("has_l2", [False, True])
def test_large_objects_find_room_behind_small_ones(has_l2: bool) -> None:
    """A few small ones fewer leave room for none of the large ones."""
    l1 = TwoSizes(1000, has_l2=has_l2)
    for index in range(130):
        l1.turn(chr(0x100 + index) * 8)
        l1.tier.hint(Hint(request_id=f"r{index}", is_last_step=True))
    assert l1.used() > 990
    stored = [l1.store_big(chr(0x400 + index) * 2) for index in range(5)]
    assert stored == [2] * 5
    assert 900 <= l1.used() <= 1000
    assert l1.errors == []


def test_what_is_worth_more_does_not_leave_for_large_objects() -> None:
    l1 = TwoSizes(1000)
    l1.turn("a" * 995)
    l1.tier.hint(Hint(request_id="r0", ttl_s=50.0))
    assert l1.store_big("xy") == 0
    assert len(l1.keys) == 995


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("has_l2", [False, True])
def test_the_budget_holds_and_no_prefix_is_missing_a_chunk(
    seed: int, has_l2: bool
) -> None:
    rng = random.Random(seed)
    l1 = L1(20, has_l2=has_l2)
    contexts = [rng.choice("st") + chr(0x100 + i) for i in range(8)]
    for _ in range(200):
        which = rng.randrange(len(contexts))
        if len(contexts[which]) > 10:
            contexts[which] = "s" + chr(0x200 + rng.randrange(1000))
        contexts[which] += rng.choice(["", "p", "pq"])
        l1.turn(contexts[which], rng.choice(["", "o"]), rng.random())
        l1.clock.advance(rng.expovariate(1.0))
        assert len(l1.keys) <= 20
        held = l1.held()
        if has_l2:
            continue  # the store of an unknown may take what lies before it
        # An old answer that did not come back is nobody's, and goes a little later.
        orphans = [key for key in held if len(key) > 1 and key[:-1] not in held]
        assert not any(l1.tier._book.holders(("m", key.encode())) for key in orphans)
    assert l1.errors == []
