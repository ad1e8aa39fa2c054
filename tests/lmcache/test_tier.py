"""Programs from chains of chunk hashes, their deadlines, and what leaves L1."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest

from ttlcache.clock import VirtualClock
from ttlcache.errors import ConfigError
from ttlcache_lmcache import hints
from ttlcache_lmcache.config import ServerModuleConfig, TierConfig, load
from ttlcache_lmcache.hints import Hint
from ttlcache_lmcache.retention.l1_tier import Tier
from ttlcache_lmcache.retention.residency import space_of

CHUNK = 10


@dataclass(frozen=True)
class Key:
    """Stands for LMCache's `ObjectKey`."""

    chunk_hash: bytes
    model_name: str = "m"
    kv_rank: int = 0
    cache_salt: str = ""


class World:
    """A tier with its L1; contexts are strings, one chunk a letter."""

    def __init__(self, **config: Any) -> None:
        self.clock = VirtualClock(1000.0)
        config = load(ServerModuleConfig, config, "test")
        self.tier = Tier(config, self.clock, lambda: 1.0, lambda _key: True)
        self.l1: dict[Key, None] = {}
        self.ranks = 1
        self.salt = ""

    def keys(self, context: str, start: int = 0) -> list[Key]:
        # As LMCache hashes: each chunk over all that is before it.
        ends = range(start + 1, len(context) + 1)
        return [
            Key(context[:end].encode(), kv_rank=rank, cache_salt=self.salt)
            for end in ends
            for rank in range(self.ranks)
        ]

    def begin(self, request: str, prompt: str, extra: int = 0) -> None:
        hashes = [prompt[:end].encode() for end in range(1, len(prompt) + 1)]
        tokens = len(prompt) * CHUNK + extra
        self.tier.lookup(request, "m", hashes, tokens, self.salt)

    def finish(self, request: str, context: str) -> None:
        new = [key for key in self.keys(context) if key not in self.l1]
        self.tier.reserved(new)
        self.tier.written(new)
        self.l1.update(dict.fromkeys(new))
        self.tier.ended(request)
        self.tier.context(self.keys(context))

    def turn(self, request: str, prompt: str, output: str = "") -> None:
        self.begin(request, prompt)
        self.finish(request, prompt + output)
        self.clock.advance(1.0)

    def delete(self, keys: list[Any]) -> None:
        for key in keys:
            self.l1.pop(key)
        self.tier.deleted(keys)

    def order(self) -> list[str]:
        return [key.chunk_hash.decode() for key in self.eviction_order()]

    def kept(self) -> list[str]:
        """Requests whose programs run or are inside a client's TTL, the first first."""
        shown = reversed(self.tier.recent_turns())
        return [str(turn["request_id"]) for turn in shown if turn["is_kept"]]

    def eviction_order(self) -> list[Any]:
        """All objects of L1 in the order in which stores would evict them."""
        tier, now_s = self.tier, self.clock.now_s()
        tier.status()  # time passes when it is asked
        tier._order.look(now_s)
        chunks = (chunk for _, _, chunk in tier._order.chunks(now_s))
        return [key for chunk in chunks for key in tier._residency.objects(chunk)]

    def count(self, name: str) -> int:
        counts = self.tier.status()["counts"]
        assert isinstance(counts, dict)
        return int(counts.get(name, 0))

    def programs(self) -> int:
        number = self.tier.status()["programs"]
        assert isinstance(number, int)
        return number


def test_a_longer_chain_goes_on_with_its_program() -> None:
    world = World()
    world.turn("r1", "sab", "cd")
    world.turn("r2", "sabcde", "f")
    assert world.programs() == 1
    assert world.count("turns_continued") == 1


def test_programs_that_share_a_system_prompt_stay_apart() -> None:
    world = World()
    world.turn("r1", "sa", "b")
    world.turn("r2", "sx", "y")
    world.turn("r3", "s")
    assert world.programs() == 3
    world.turn("r4", "sxyz")
    assert (world.programs(), world.count("turns_continued")) == (3, 1)


def test_the_names_of_a_space_are_kept_once() -> None:
    """LMCache decodes them anew for every request, and chunks are many."""
    spaces = [space_of("".join(["mod", "el"]), "".join(["sa", "lt"])) for _ in "ab"]
    plain = [space_of("".join(["mod", "el"]), "") for _ in "ab"]
    assert spaces[0] is spaces[1] != plain[0] is plain[1]


def test_stripped_reasoning_is_the_same_program() -> None:
    """The output comes back in another form: the prompt alone is a prefix."""
    world = World()
    world.turn("r1", "sab", "XY")
    world.turn("r2", "sabxyz")
    assert world.programs() == 1
    # What only the old form had is nobody's, and goes early.
    world.clock.advance(100.0)
    assert world.order()[:2] == ["sabXY", "sabX"]


def test_expired_goes_before_kept_and_tail_before_prefix() -> None:
    world = World()
    world.turn("r1", "ab")
    world.clock.advance(5.0)
    world.turn("r2", "xy")
    assert world.order() == ["xy", "x", "ab", "a"]  # both kept: the latest first
    world.tier.hint(Hint(request_id="r1", ttl_s=100.0))
    world.clock.advance(12.0)
    assert world.order() == ["xy", "x", "ab", "a"]  # the second has expired


def test_a_shared_prefix_goes_with_its_last_holder() -> None:
    world = World()
    world.turn("r1", "sa")
    world.turn("r2", "sb")
    assert world.order() == ["sb", "sa", "s"]


def test_all_parts_of_a_chunk_go_together() -> None:
    world = World()
    world.ranks = 2
    world.turn("r1", "ab")
    assert world.order() == ["ab", "ab", "a", "a"]


def test_finished_goes_first_of_all() -> None:
    world = World()
    world.turn("r1", "ab")
    world.clock.advance(100.0)
    world.tier.hint(Hint(request_id="r2", is_last_step=True))
    world.turn("r2", "xy")
    assert world.order() == ["xy", "x", "ab", "a"]


def test_under_another_salt_the_same_chunks_are_another_programs() -> None:
    """As after a reset: the old ones are old although their hashes are used again."""
    world = World()
    world.turn("r1", "sab")
    world.tier.hint(Hint(request_id="r1", ttl_s=5.0))
    world.salt = "~after-the-reset"
    for turn in range(8):
        world.turn(f"new{turn}", "sab")
    assert world.programs() == 2
    oldest = world.eviction_order()[:3]
    assert [(key.chunk_hash, key.cache_salt) for key in oldest] == [
        (b"sab", ""),
        (b"sa", ""),
        (b"s", ""),
    ]


def test_a_new_turn_ends_a_ttl() -> None:
    world = World()
    world.turn("r1", "ab")
    world.tier.hint(Hint(request_id="r1", ttl_s=8.0))
    world.begin("r2", "abc")
    world.clock.advance(500.0)
    assert world.kept() == ["r1"]  # a request runs
    world.finish("r2", "abc")
    assert world.kept() == []
    assert world.count("expired") == 0


def test_a_hint_counts_before_and_after_the_end() -> None:
    world = World()
    world.tier.hint(Hint(request_id="r1", ttl_s=2.0))
    world.turn("r1", "ab")
    world.turn("r2", "xy")
    world.tier.hint(Hint(request_id="r2", ttl_s=100.0))
    world.clock.advance(20.0)
    assert (world.kept(), world.count("expired")) == (["r2"], 1)
    world.clock.advance(80.0)
    assert (world.kept(), world.count("expired")) == ([], 2)


def test_a_hint_is_capped() -> None:
    world = World(max_ttl_s=5.0)
    world.tier.hint(Hint(request_id="r1", ttl_s=1e9))
    world.turn("r1", "ab")
    assert world.kept() == ["r1"]
    world.clock.advance(4.0)
    assert world.kept() == []


def test_events_may_come_in_another_order() -> None:
    """LMCache's bus is another thread: the end may be heard before the context."""
    world = World()
    world.tier.context(world.keys("ab"))
    world.begin("r1", "ab")
    world.tier.ended("r1")
    world.tier.written(world.keys("abc"))
    world.tier.context(world.keys("abc"))
    world.turn("r2", "abcd")
    assert (world.programs(), world.count("turns_continued")) == (1, 1)
    world.tier.ended("never seen")


def test_the_silent_are_forgotten() -> None:
    world = World(program_idle_s=60.0, max_programs=3)
    for index in range(5):
        world.turn(f"r{index}", f"{index}a")
    assert world.programs() == 3
    world.begin("dies", "zz")
    world.clock.advance(61.0)
    assert world.programs() == 0
    assert world.order()  # nobody's now, but still to be evicted


@pytest.mark.parametrize("seed", range(20))
def test_the_order_holds_every_object_of_l1_once(seed: int) -> None:
    rng = random.Random(seed)
    world = World(max_programs=8, program_idle_s=50.0)
    contexts: list[str] = []
    for step in range(200):
        if contexts and rng.random() < 0.7:
            context = rng.choice(contexts)[: rng.randrange(1, 12)]
        else:
            context = rng.choice("st")
        context += rng.choice("abc") * rng.randrange(3)
        contexts = [*contexts[-20:], context]
        world.begin(f"r{step}", context)
        if rng.random() < 0.9:
            world.finish(f"r{step}", context + rng.choice(["", "x"]))
        world.clock.advance(rng.random() * 5.0)
        order = world.eviction_order()
        assert len(order) == len(set(order))
        assert set(order) == set(world.l1)
        if order and rng.random() < 0.3:
            world.delete(order[: len(order) // 3])


def test_wrong_settings_are_named() -> None:
    with pytest.raises(ConfigError, match="did you mean 'max_ttl_s'"):
        load(ServerModuleConfig, {"max_ttl": 1.0}, "here")
    with pytest.raises(ConfigError, match="here: key 'path' is missing"):
        load(TierConfig, {"disk_bytes": 1}, "here")
    with pytest.raises(ConfigError, match="at least one"):
        load(TierConfig, {"path": "x", "disk_bytes": 0}, "here")
    with pytest.raises(ConfigError, match="unknown key 'demote_above'"):
        load(ServerModuleConfig, {"demote_above": 1.0}, "here")
    with pytest.raises(ConfigError, match="request_id"):
        hints.decode(b'[{"request": "x"}]')
