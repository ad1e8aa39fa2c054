"""Lookups that outlive their answer, or the request that asked; and their salts.

When a waiting request asks the lower tier anew; the real pair is in tests/e2e.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from lmcache.integration.vllm.lmcache_mp_metadata import LMCacheMPRequestState
from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey

from ttlcache_connector.tiers.lmcache.lookups import StaleLookups
from ttlcache_connector.tiers.lmcache.orphaned_lookups import OrphanedLookups
from ttlcache_connector.tiers.lmcache.salts import SaltGenerations

CHUNK = 8
CONTEXT = list(range(100, 140))


class Rig:
    """One waiting request that has asked, and a turn that goes down meanwhile."""

    def __init__(self, prompt=(*CONTEXT, 7, 8), salt="", found=8, picture=()):
        self.found = {"w": found}
        self.given_back = []
        tokens = list(prompt)
        self.tracker = SimpleNamespace(
            state=LMCacheMPRequestState.PREFETCHING,
            cache_salt=salt,
            all_token_ids=tokens,
            mm_adjusted_prompt_ids=list(picture),
            get_token_ids=lambda: [*picture, *tokens[len(picture) :]],
            num_stored_tokens=found or 0,
            num_lmcache_hit_tokens=found or 0,
        )
        self.adapter = SimpleNamespace(
            _pending_lookups={"w", "unknown"},
            check_lookup_result=lambda request_id: self.found[request_id],
            lmcache_tokens_per_chunk=CHUNK,
        )
        trackers = {"w": self.tracker}
        self.lookups = StaleLookups(self.adapter, trackers, self.given_back.append)

    def copy_begins(self, end=32, context=CONTEXT):
        # What runs on after the last store is not in it.
        op = SimpleNamespace(token_ids=context, end=end)
        self.lookups.on_copies_start({"t": SimpleNamespace(op=op, cache_salt="")})

    def goes_down(self, **kwargs):
        self.copy_begins(**kwargs)
        self.lookups.on_copy_end("t")

    def asks_again(self, hit_tokens=0):
        """Whether it does: its old lookup is given back then, once."""
        before = len(self.given_back)
        renewed = self.lookups.renew_if_stale("w", hit_tokens)
        assert self.given_back[before:] == (["w"] if renewed else [])
        return renewed


def test_what_is_found_later_is_asked_for_again():
    rig = Rig()
    rig.goes_down()
    assert rig.asks_again()  # in the next step
    assert rig.tracker.num_stored_tokens == rig.tracker.num_lmcache_hit_tokens == 0
    assert not rig.asks_again()


def test_a_lookup_under_way_is_waited_for():
    rig = Rig(found=None)
    rig.goes_down()
    assert rig.lookups.renew_if_stale("w", 0)
    rig.found["w"] = 32  # it began late enough after all
    assert not rig.lookups.renew_if_stale("w", 0)
    assert rig.given_back == []


def test_not_while_gpu_memory_has_it_anyway():
    rig = Rig()
    rig.goes_down()
    assert not rig.asks_again(32)
    assert rig.asks_again(16)  # its pin lost its tail


@pytest.mark.parametrize("found", [0, 8, 16])
def test_a_prompt_that_repeats_a_part_asks_for_that(found):
    """As where a template leaves thoughts of earlier turns out."""
    rig = Rig(prompt=[*CONTEXT[:21], 1, 2, 3, *CONTEXT], found=found)
    rig.goes_down()
    assert rig.asks_again() == (found != 16)


@pytest.mark.parametrize(
    "other",
    [
        {"prompt": [*CONTEXT[:15], 1, 2, 3]},
        {"prompt": [1, *CONTEXT[1:], 7], "found": 0},
        {"prompt": CONTEXT[:15]},
        {"salt": "somebody else's"},
        {"found": 32},
        {"picture": [*CONTEXT[:8], *[5] * 10]},  # another one at the same place
    ],
)
def test_others_need_not_ask_again(other):
    rig = Rig(**other)
    rig.goes_down()
    assert not rig.asks_again()


def test_a_picture_is_known_by_what_it_shows():
    shown = [*CONTEXT[:8], *[5] * 24]
    rig = Rig(prompt=[*CONTEXT[:8], *[0] * 24, 7, 8], picture=shown)
    rig.goes_down(context=[*shown, *CONTEXT[32:]])
    assert rig.asks_again()


def test_nor_who_loads_already_or_has_left():
    rig = Rig()
    rig.tracker.state = LMCacheMPRequestState.WAITING_FOR_LOAD
    rig.goes_down()
    assert not rig.asks_again()
    rig.tracker.state = LMCacheMPRequestState.PREFETCHING
    rig.goes_down()
    rig.lookups.forget("w")
    assert not rig.asks_again()


@pytest.mark.parametrize("how", ["failed", "reset before", "reset after", "unknown"])
def test_a_copy_that_brings_nothing(how):
    rig = Rig()
    if how != "unknown":
        rig.copy_begins()
    if how == "failed":
        rig.lookups.on_copy_failed("t")
    if how == "reset before":
        rig.lookups.reset()
    rig.lookups.on_copy_end("t")
    if how == "reset after":
        rig.lookups.reset()
    assert not rig.asks_again()


# --- whose request has left --------------------------------------------------------


class Adapter:
    """Answers a lookup when the test says so."""

    def __init__(self, found: int | None = None) -> None:
        self._pending_lookups = {"r"}
        self.found = found
        self.calls: list[tuple[Any, ...]] = []

    def check_lookup_result(self, request_id: str) -> int | None:
        return self.found

    def free_lookup_locks(self, *what: Any) -> None:
        self.calls.append(("free", *what))
        if self.found == 7:
            raise RuntimeError("the server is gone")

    def cleanup_lookup_result(self, request_id: str) -> None:
        self._pending_lookups.discard(request_id)
        self.calls.append(("clean up", request_id))

    def end_session(self, request_id: str) -> None:
        self.calls.append(("end", request_id))


def test_a_session_lasts_until_its_locks_are_released():
    adapter = Adapter()
    orphans = OrphanedLookups(adapter)
    orphans.add("r", [1, 2, 3], "salt")
    adapter.cleanup_lookup_result("r")
    adapter.end_session("r")
    orphans.settle()
    assert adapter.calls == []
    adapter.found = 2
    orphans.settle()
    released = ("free", [1, 2, 3], 0, 2, "r", "salt")
    assert adapter.calls == [released, ("clean up", "r"), ("end", "r")]
    assert len(orphans) == 0
    adapter.end_session("r")  # nobody's any more
    assert adapter.calls[3:] == [("end", "r")]


def test_what_has_ended_is_released_at_once():
    adapter = Adapter(found=2)
    OrphanedLookups(adapter).add("r", [1, 2, 3], "")
    assert [call[0] for call in adapter.calls] == ["free", "clean up"]


def test_what_cannot_be_released_is_tried_once():
    adapter = Adapter()
    orphans = OrphanedLookups(adapter)
    orphans.add("r", [1, 2, 3], "")
    adapter.found = 7
    with pytest.raises(RuntimeError):
        orphans.settle()
    orphans.settle()
    assert [call[0] for call in adapter.calls] == ["free"]


@pytest.mark.parametrize(
    "salt", ["", "tenant", "a/b+c==", "x" * 128, "x" * 9000, "a\0b", "@", "\udc80", "é"]
)
def test_any_clients_salt_is_one_that_lmcache_takes(salt):
    adapter = Adapter()
    inner = SimpleNamespace(
        scheduler_adapter=adapter,
        request_trackers={},
        _get_or_create_request_tracker=None,
    )
    salts = SaltGenerations(inner, OrphanedLookups(adapter))
    names = {salts.salt(salt)}
    for _ in range(3):
        salts.start_generation()
        names.add(salts.salt(salt))
        assert salts.salt(salt) == salts.salt(salt) != salts.salt(salt + "2")
    assert len(names) == 4
    for name in names:
        assert name.isascii()  # it is sent
        assert len(name) <= IPCCacheServerKey._SALT_MAX_LEN
        assert IPCCacheServerKey._SALT_FORBIDDEN_CHARS.isdisjoint(name)
