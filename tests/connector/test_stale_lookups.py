"""When a waiting request asks the lower tier anew; the real pair is in tests/e2e."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("lmcache", reason="the matrix of vLLM versions has no LMCache")

from lmcache.integration.vllm.lmcache_mp_metadata import LMCacheMPRequestState

from ttlcache_connector.tiers.lmcache.lookups import StaleLookups

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
        self.lookups = StaleLookups(
            self.adapter, {"w": self.tracker}, self.given_back.append
        )

    def copy_begins(self, end=32, context=CONTEXT):
        # What runs on after the last store is not in it.
        op = SimpleNamespace(token_ids=context, end=end)
        self.lookups.on_copies_start({"t": SimpleNamespace(op=op, cache_salt="")})

    def goes_down(self, **kwargs):
        self.copy_begins(**kwargs)
        self.lookups.on_copy_end("t")


def test_what_is_found_later_is_asked_for_again():
    rig = Rig()
    rig.goes_down()
    assert rig.lookups.renew_if_stale("w", 0)  # in the next step
    assert rig.given_back == ["w"]
    assert rig.tracker.num_stored_tokens == rig.tracker.num_lmcache_hit_tokens == 0
    assert not rig.lookups.renew_if_stale("w", 0)
    assert rig.given_back == ["w"]


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
    assert not rig.lookups.renew_if_stale("w", 32)
    assert rig.given_back == []
    assert rig.lookups.renew_if_stale("w", 16)  # its pin lost its tail
    assert rig.given_back == ["w"]


@pytest.mark.parametrize("found", [0, 8, 16])
def test_a_prompt_that_repeats_a_part_asks_for_that(found):
    """As where a template leaves thoughts of earlier turns out."""
    rig = Rig(prompt=[*CONTEXT[:21], 1, 2, 3, *CONTEXT], found=found)
    rig.goes_down()
    assert rig.lookups.renew_if_stale("w", 0) == (found != 16)
    assert rig.given_back == ([] if found == 16 else ["w"])


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
    assert not rig.lookups.renew_if_stale("w", 0)
    assert rig.given_back == []


def test_a_picture_is_known_by_what_it_shows():
    shown = [*CONTEXT[:8], *[5] * 24]
    rig = Rig(prompt=[*CONTEXT[:8], *[0] * 24, 7, 8], picture=shown)
    rig.goes_down(context=[*shown, *CONTEXT[32:]])
    assert rig.lookups.renew_if_stale("w", 0)
    assert rig.given_back == ["w"]


def test_nor_who_loads_already_or_has_left():
    rig = Rig()
    rig.tracker.state = LMCacheMPRequestState.WAITING_FOR_LOAD
    rig.goes_down()
    assert not rig.lookups.renew_if_stale("w", 0)
    rig.tracker.state = LMCacheMPRequestState.PREFETCHING
    rig.goes_down()
    rig.lookups.forget("w")
    assert not rig.lookups.renew_if_stale("w", 0)
    assert rig.given_back == []


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
    assert not rig.lookups.renew_if_stale("w", 0)
    assert rig.given_back == []
