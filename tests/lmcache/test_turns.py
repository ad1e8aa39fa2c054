"""An engine that keeps KV by itself: it says when turns end, and looks up little."""

from __future__ import annotations

from typing import Any

import pytest

from tests.lmcache.test_tier import CHUNK, World, hashes_of
from ttlcache_lmcache.hints import Hint, decode, encode
from ttlcache_lmcache.retention.residency import chain_of


class Engine(World):
    """A world whose engine pins turns: sessions end when the pin does."""

    def store(self, request: str, context: str) -> None:
        """The session of a request ends that looked nothing up."""
        self.write(context)
        tokens = len(context) * CHUNK
        self.tier.stored(request, chain_of("m", "", hashes_of(context)), tokens)
        self.tier.ended(request)

    def tell(self, request: str, **fields: Any) -> None:
        hint = Hint(request_id=request, is_over=True, **fields)
        self.tier.hint(decode(encode([hint]))[0])

    def shown(self, request: str) -> dict[str, Any]:
        found = self.tier.recent_turns()
        return next(each for each in found if each["request_id"] == request)

    def ttl_s(self, request: str) -> tuple[float, float]:
        """As it was told, and what is left of it."""
        shown = self.shown(request)
        return shown["ttl_s"], shown["left_s"]


@pytest.mark.parametrize("told_late", [False, True])
def test_a_ttl_counts_from_the_turns_end_not_from_the_sessions(told_late):
    world = Engine()
    world.begin("r1", "ab")
    if told_late:
        world.finish("r1", "abc")
        world.clock.advance(20.0)
        world.hint("r1", ttl_s=30.0)
    else:
        world.tell("r1", ttl_s=30.0, program="p")
        world.clock.advance(20.0)  # pinned meanwhile
        world.finish("r1", "abc")
    assert world.ttl_s("r1") == (30.0, 10.0)
    assert world.shown("r1")["chunks"] == 3
    world.clock.advance(9.0)
    assert world.kept() == ["r1"]
    world.clock.advance(2.0)
    assert world.kept() == []


def test_a_turn_that_looked_nothing_up_is_its_programs():
    """The second turn claims the first one's pin: it asks the server for nothing."""
    world = Engine()
    world.begin("r1", "ab")
    world.tell("r1", ttl_s=30.0, program="p")
    world.finish("r1", "ab")
    world.clock.advance(10.0)
    world.tell("r2", ttl_s=50.0, program="p")
    assert world.ttl_s("r2") == (50.0, 50.0)  # what r1 left is renewed
    world.clock.advance(40.0)
    assert world.kept() == ["r1", "r2"]
    world.store("r2", "abcd")
    assert world.programs() == 1
    assert world.shown("r2")["chunks"] == 4
    assert world.ttl_s("r2") == (50.0, 10.0)
    # A later lookup goes on with it.
    world.turn("r3", "abcde")
    assert world.continued() == (1, 1)


def test_a_hint_is_remembered_until_something_is_stored():
    world = Engine()
    world.tell("r1", ttl_s=30.0, program="p")
    world.clock.advance(10.0)
    world.store("r1", "ab")
    assert world.ttl_s("r1") == (30.0, 20.0)
    world.store("r2", "xy")  # nobody said anything of this one
    assert world.shown("r2")["ttl_s"] == 0.0
    assert world.kept() == ["r1"]
    for number, hashes in enumerate(([b"c", b"cd"], [])):
        chain = chain_of("m", "", hashes)
        world.tier.stored(f"not in L1 {number}", chain, 10 * len(hashes))
    assert world.programs() == 2


def test_the_last_step_is_first_to_go():
    world = Engine()
    world.store("kept", "ab")
    world.tell("kept", ttl_s=100.0, program="p", tool=("bash", "git"))
    (program,) = world.tier._book.programs()
    assert program.gap_key == ("bash", "git")  # a tool of several parts is one key
    world.clock.advance(5.0)
    world.tell("done", is_last_step=True, program="q")
    world.store("done", "xy")
    assert world.shown("done")["is_finished"]
    assert world.order() == ["xy", "x", "ab", "a"]


def test_who_was_heard_of_before_its_store_is_as_old_as_that():
    """Its store comes late; it is forgotten for the silence since its turn's end."""
    world = Engine(program_idle_s=100.0)
    world.store("r1", "ab")
    world.tell("r1", ttl_s=1.0, program="p")
    world.tell("r2", ttl_s=1.0, program="p")
    world.clock.advance(50.0)
    world.store("r3", "xy")
    world.clock.advance(10.0)
    world.store("r2", "abcd")
    assert world.programs() == 2
    world.clock.advance(45.0)  # r2 ended 105 s ago, r3 only 55
    assert (world.programs(), world.count("forgotten")) == (1, 1)
    # What was forgotten is somebody new when it stores after all.
    world.store("r2", "abcd")
    assert world.programs() == 2


def test_an_older_turns_session_that_ends_later_shortens_nothing():
    world = Engine()
    world.store("r1", "ab")
    world.tell("r1", ttl_s=30.0, program="p")
    for request in ("r2", "r3"):
        world.clock.advance(1.0)
        world.tell(request, ttl_s=30.0, program="p")
    world.store("r3", "abcdef")
    world.store("r2", "abcd")
    assert world.shown("r3")["chunks"] == 6
    world.turn("r4", "abcdefg")
    assert world.continued() == (1, 1)


# whose chunks they are


@pytest.fixture
def world():
    """Of two programs behind one system prompt the short one has only that."""
    world = World()
    world.turn("q1", "sab", "cd")
    world.turn("short1", "s")
    assert world.programs() == 2
    world.begin("q2", "sabcde")
    world.tier.context(world.keys("sab"))  # L1 has lost the rest; LMCache touches this
    world.finish("q2", "sabcdef")
    return world


def test_what_a_hit_is_a_part_of_belongs_to_nobody_else(world):
    world.turn("short2", "sxy")
    assert world.continued() == (2, 2)


def test_a_finished_programs_kv_goes_first_although_a_hit_was_partial(world):
    world.hint("q2", is_last_step=True)
    gone = ["sabcdef", "sabcde", "sabcd", "sabc", "sab", "sa"]
    assert world.order() == [*gone, "s"]


def test_what_starts_like_anothers_answer_is_its_own_all_the_same():
    world = World()
    world.turn("q1", "sab")
    world.turn("p1", "s", "ac")  # both answers begin with the same chunk
    assert [len(each.chain) for each in world.tier._book.programs()] == [3, 3]
    world.turn("p2", "sacd")
    assert world.continued() == (2, 1)
