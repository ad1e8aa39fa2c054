"""When a waiting request asks the lower tier anew; the real pair is in tests/e2e."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("lmcache", reason="the matrix of vLLM versions has no LMCache")

from lmcache.integration.vllm.lmcache_mp_metadata import LMCacheMPRequestState

from ttlcache_connector.lower_lmcache.outdated import (
    MAX_COPIES,
    OutdatedLookups,
)

CONTEXT = list(range(100, 140))


class Rig:
    """One waiting request that has asked, and a turn that goes down meanwhile."""

    def __init__(self, prompt=(*CONTEXT, 7, 8), salt=""):
        self.found = {"w": 8}
        self.forgotten = []
        tokens = list(prompt)
        self.tracker = SimpleNamespace(
            state=LMCacheMPRequestState.PREFETCHING,
            cache_salt=salt,
            all_token_ids=tokens,
            get_token_ids=lambda: tokens,
            num_stored_tokens=8,
            num_lmcache_hit_tokens=8,
        )
        self.adapter = SimpleNamespace(
            _pending_lookups={"w", "ttlcache-ahead-x"},
            check_lookup_result=lambda request_id: self.found[request_id],
        )
        self.lookups = OutdatedLookups(
            self.adapter, {"w": self.tracker}, self.forgotten.append
        )

    def copy_begins(self, request_id="t", end=32):
        # What runs on after the last store is not in it.
        op = SimpleNamespace(token_ids=CONTEXT, end=end)
        stored = SimpleNamespace(request_id=request_id, op=op, cache_salt="")
        self.lookups.copy_begins(stored)

    def goes_down(self, end=32):
        self.copy_begins(end=end)
        self.lookups.copy_ended("t")


def test_what_is_found_later_is_asked_for_again():
    rig = Rig()
    rig.goes_down()
    assert rig.lookups.may_ask("w", 0)
    assert rig.forgotten == ["w"]
    assert rig.tracker.num_stored_tokens == rig.tracker.num_lmcache_hit_tokens == 0
    assert rig.lookups.may_ask("w", 0)  # and no third time
    assert rig.forgotten == ["w"]


def test_a_lookup_under_way_is_waited_for():
    rig = Rig()
    rig.goes_down()
    rig.found["w"] = None
    assert not rig.lookups.may_ask("w", 0)
    rig.found["w"] = 32  # it began late enough after all
    assert rig.lookups.may_ask("w", 0)
    assert rig.forgotten == []


def test_not_while_gpu_memory_has_it_anyway():
    rig = Rig()
    rig.goes_down()
    assert rig.lookups.may_ask("w", 32)
    assert rig.forgotten == []
    assert rig.lookups.may_ask("w", 16)  # its pin lost its tail
    assert rig.forgotten == ["w"]


@pytest.mark.parametrize(
    "other",
    [
        {"prompt": [*CONTEXT[:31], 1, 2, 3]},
        {"prompt": [1, *CONTEXT[1:], 7]},
        {"prompt": CONTEXT[:31]},
        {"salt": "somebody else's"},
    ],
)
def test_others_need_not_ask_again(other):
    rig = Rig(**other)
    rig.goes_down()
    assert rig.lookups.may_ask("w", 0)
    assert rig.forgotten == []


def test_nor_who_loads_already_or_has_left():
    rig = Rig()
    rig.tracker.state = LMCacheMPRequestState.WAITING_FOR_LOAD
    rig.goes_down()
    assert rig.lookups.may_ask("w", 0)
    rig.tracker.state = LMCacheMPRequestState.PREFETCHING
    rig.goes_down()
    rig.lookups.forget("w")
    assert rig.lookups.may_ask("w", 0)
    assert rig.forgotten == []


def test_copies_whose_end_is_never_told_do_not_add_up():
    rig = Rig()
    rig.copy_begins("first")
    for number in range(MAX_COPIES):
        rig.copy_begins(f"lost-{number}")
    assert len(rig.lookups._copies) == MAX_COPIES
    rig.lookups.copy_ended("first")
    assert rig.lookups.may_ask("w", 0)
    assert rig.forgotten == []
    rig.lookups.copy_ended("lost-0")
    assert rig.lookups.may_ask("w", 0)
    assert rig.forgotten == ["w"]


def test_a_store_that_nobody_began_tells_nothing():
    rig = Rig()
    rig.lookups.copy_ended("t")
    assert rig.lookups.may_ask("w", 0)
    assert rig.forgotten == []
