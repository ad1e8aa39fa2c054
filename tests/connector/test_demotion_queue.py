"""What LMCache's lazy offload is told to store, and when."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("lmcache", reason="the matrix of vLLM versions has no LMCache")

from lmcache.integration.vllm.lazy_offload_policy.base import DrainSignals

from ttlcache_connector.lower_lmcache.demotion_queue import DemotionQueue


def offer(queue: DemotionQueue, request_id: str, *, hashed: bool = True) -> None:
    meta = SimpleNamespace(request_id=request_id)
    queue.add(meta, {1: b"hash" if hashed else None})


def drain(queue: DemotionQueue, *blocked: str) -> list[str]:
    signals = DrainSignals(0, 0, set(), set(blocked))
    done = queue.drain(signals)
    assert queue.emitted == [item.request_id for item in done.items]
    return queue.emitted


def test_nothing_is_stored_before_it_is_due():
    queue = DemotionQueue("expiry")
    offer(queue, "a")
    offer(queue, "a")
    assert drain(queue) == []
    assert queue.is_due("a")
    assert drain(queue) == ["a"]
    assert drain(queue) == []
    assert not queue.has_pending_request("a")
    assert not queue.is_due("a")


def test_a_request_with_a_store_under_way_waits():
    queue = DemotionQueue("write-through")
    offer(queue, "a")
    offer(queue, "b")
    assert drain(queue, "a") == ["b"]
    assert drain(queue) == ["a"]


def test_forgotten_turns_are_not_stored_and_their_sessions_end():
    queue = DemotionQueue("expiry")
    offer(queue, "a")
    queue.is_due("a")
    queue.forget("a")
    assert queue.has_due  # a step is needed to end its session
    done = queue.drain(DrainSignals(0, 0, set(), set()))
    assert done.items == []
    assert done.emptied_request_ids == ["a"]
    assert not queue.has_due


def test_ahead_one_at_a_time_and_only_while_nothing_else_is_copied():
    queue = DemotionQueue("idle-ahead")
    for name in "abc":
        offer(queue, name)
    queue.may_go_ahead("a")
    queue.may_go_ahead("b")
    queue.is_due("c")
    assert drain(queue) == ["c"]
    assert drain(queue, "c") == []
    assert drain(queue) == ["a"]
    assert queue.has_due  # an idle engine goes on stepping for it
    assert drain(queue) == ["b"]
    assert not queue.has_due


@pytest.mark.parametrize("broken", ["unhashed", "failed"])
def test_after_a_gap_nothing_more_of_the_request_is_stored(broken):
    queue = DemotionQueue("expiry")
    offer(queue, "a")
    if broken == "unhashed":
        offer(queue, "a", hashed=False)
    else:
        assert queue.mark_store_failed("a") == 1
    offer(queue, "a")
    queue.is_due("a")
    queue.drop_request("a")  # preempted: it starts anew
    offer(queue, "a")
    assert queue.is_due("a")
    assert drain(queue) == ["a"]
