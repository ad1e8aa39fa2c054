"""Programs from chains of chunk hashes, their deadlines, and what leaves L1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from ttlcache.clock import VirtualClock
from ttlcache.errors import ConfigError
from ttlcache_lmcache import hints
from ttlcache_lmcache.config import DiskConfig, ServerModuleConfig, load
from ttlcache_lmcache.hints import Hint
from ttlcache_lmcache.retention import l1_tier
from ttlcache_lmcache.retention.l1_tier import Tier
from ttlcache_lmcache.retention.residency import chain_of

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
        self.tier = Tier(config, self.clock, self.usage, self.is_evictable)
        self.l1: dict[Key, None] = {}
        self.ranks = 1
        self.salt = ""

    def usage(self) -> float:
        return 1.0

    def is_evictable(self, key: Key) -> bool:
        return True

    def keys(self, context: str) -> list[Key]:
        return [
            Key(chunk, kv_rank=rank, cache_salt=self.salt)
            for chunk in hashes_of(context)
            for rank in range(self.ranks)
        ]

    def begin(self, request: str, prompt: str) -> None:
        tokens = len(prompt) * CHUNK
        self.tier.lookup(request, chain_of("m", self.salt, hashes_of(prompt)), tokens)

    def write(self, context: str) -> None:
        new = [key for key in self.keys(context) if key not in self.l1]
        self.tier.reserved(new)
        self.tier.written(new)
        self.l1.update(dict.fromkeys(new))

    def finish(self, request: str, context: str) -> None:
        self.write(context)
        self.tier.ended(request)
        self.tier.context(self.keys(context))

    def turn(self, request: str, prompt: str, output: str = "") -> None:
        self.begin(request, prompt)
        self.finish(request, prompt + output)
        self.clock.advance(1.0)

    def hint(self, request: str, **fields: Any) -> None:
        self.tier.hint(Hint(request_id=request, **fields))

    def delete(self, keys: list[Any]) -> int:
        for key in keys:
            self.l1.pop(key, None)
        self.tier.deleted(keys)
        return len(keys)

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

    def count(self, name: str) -> Any:
        return self.tier.status()["counts"].get(name, 0)

    def programs(self) -> Any:
        return self.tier.status()["programs"]

    def continued(self) -> tuple[int, int]:
        """Programs there are, and turns that went on with one."""
        return self.programs(), self.count("turns_continued")


def hashes_of(context: str) -> list[bytes]:
    """As LMCache hashes: each chunk over all that is before it."""
    return [context[:end].encode() for end in range(1, len(context) + 1)]


def test_the_longest_silent_are_forgotten_where_contexts_are_too_many(monkeypatch):
    monkeypatch.setattr(l1_tier, "MAX_CHUNKS", 10)
    world = World()
    for number, name in enumerate("abcd"):
        world.turn(f"r{number}", name + "..")
    world.turn("r4", "a..", "b")  # three of these three chunks are twice there
    assert world.programs() == 3
    world.turn("r5", "xxxxxxxxxxxxx")
    assert world.programs() == 0


def test_programs_that_share_a_system_prompt_stay_apart():
    world = World()
    world.turn("r1", "sa", "b")
    world.turn("r2", "sx", "y")
    world.turn("r3", "s")
    assert world.programs() == 3
    world.turn("r4", "sxyz")
    assert world.continued() == (3, 1)


def test_stripped_reasoning_is_the_same_program():
    """The output comes back in another form: the prompt alone is a prefix."""
    world = World()
    world.turn("r1", "sab", "XY")
    world.turn("r2", "sabxyz")
    assert world.programs() == 1
    # What only the old form had is nobody's, and goes early.
    world.clock.advance(100.0)
    assert world.order()[:2] == ["sabXY", "sabX"]


def test_expired_goes_before_kept_and_tail_before_prefix():
    world = World()
    world.ranks = 2  # all parts of a chunk go together
    world.turn("r1", "ab")
    world.clock.advance(5.0)
    world.turn("r2", "xy")
    both = ["xy", "xy", "x", "x", "ab", "ab", "a", "a"]
    assert world.order() == both  # both kept: the latest first
    world.hint("r1", ttl_s=100.0)
    world.clock.advance(12.0)
    assert world.order() == both  # the second has expired


def test_under_another_salt_the_same_chunks_are_another_programs():
    """As after a reset: the old ones are old although their hashes are used again."""
    world = World()
    world.turn("r1", "sab")
    world.hint("r1", ttl_s=5.0)
    world.salt = "~after-the-reset"
    for turn in range(8):
        world.turn(f"new{turn}", "sab")
    assert world.programs() == 2
    oldest = [(key.chunk_hash, key.cache_salt) for key in world.eviction_order()[:3]]
    assert oldest == [(b"sab", ""), (b"sa", ""), (b"s", "")]


def test_a_hint_counts_before_and_after_the_end_until_the_next_turn():
    world = World(max_ttl_s=100.0)
    world.hint("r1", ttl_s=2.0)
    world.turn("r1", "ab")
    world.turn("r2", "xy")
    world.hint("r2", ttl_s=1e9)  # it is capped
    world.turn("r3", "pq")
    world.hint("r3", ttl_s=8.0)
    world.begin("r4", "pqr")
    world.clock.advance(20.0)
    assert (world.kept(), world.count("expired")) == (["r2", "r3"], 1)  # one runs
    world.finish("r4", "pqr")
    assert (world.kept(), world.count("expired")) == (["r2"], 1)
    world.clock.advance(80.0)
    assert (world.kept(), world.count("expired")) == ([], 2)


def test_events_may_come_in_another_order():
    """LMCache's bus is another thread: the end may be heard before the context."""
    world = World()
    world.tier.context(world.keys("ab"))
    world.begin("r1", "ab")
    world.tier.ended("r1")
    world.tier.written(world.keys("abc"))
    world.tier.context(world.keys("abc"))
    world.turn("r2", "abcd")
    assert world.continued() == (1, 1)
    world.tier.ended("never seen")


def test_the_silent_are_forgotten():
    world = World(program_idle_s=60.0, max_programs=3)
    for index in range(5):
        world.turn(f"r{index}", f"{index}a")
    assert world.programs() == 3
    world.begin("dies", "zz")
    world.clock.advance(61.0)
    assert world.programs() == 0
    assert not world.tier._returns._gaps._open
    assert world.tier._returns._gaps.count(with_censored=True) == 5
    assert world.order()  # nobody's now, but still to be evicted


@pytest.mark.parametrize(
    ("kind", "settings", "said"),
    [
        (ServerModuleConfig, {"max_ttl": 1.0}, "did you mean 'max_ttl_s'"),
        (ServerModuleConfig, {"demote_above": 1.0}, "unknown key 'demote_above'"),
        (DiskConfig, {"disk_bytes": 1}, "here: key 'path' is missing"),
        (DiskConfig, {"path": "x", "disk_bytes": 0}, "key 'disk_bytes' has value 0"),
    ],
)
def test_wrong_settings_are_named(kind, settings, said):
    with pytest.raises(ConfigError, match=said):
        load(kind, settings, "here")
    with pytest.raises(ConfigError, match="request_id"):
        hints.decode(b'[{"request": "x"}]')
