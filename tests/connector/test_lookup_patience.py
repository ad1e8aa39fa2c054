"""How long a step waits for an answer from below."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("lmcache", reason="the matrix of vLLM versions has no LMCache")

from ttlcache.clock import VirtualClock
from ttlcache_connector.tiers.lmcache.lookup_wait import MAX_WAIT_S, LookupPatience


class Rig:
    """LMCache's adapter, whose answers come after a while of virtual time."""

    def __init__(self):
        self.clock = VirtualClock()
        self.adapter = SimpleNamespace(_unacked_lookups={}, _lookup_status={})
        self.patience = LookupPatience(self.adapter, self.clock.now_s)

    def answer(self, after_s):
        due_s = self.clock.now_s() + after_s

        def wait(timeout):
            left_s = due_s - self.clock.now_s()
            assert timeout >= 0.0
            self.clock.advance(max(0.0, min(left_s, timeout)))
            return left_s <= timeout

        return SimpleNamespace(wait=wait)

    def asks(self, request_id, *after_s):
        futures = {i: self.answer(each) for i, each in enumerate(after_s)}
        self.adapter._unacked_lookups[request_id] = SimpleNamespace(futures=futures)

    def is_asked_for_the_result(self, request_id, after_s):
        self.adapter._unacked_lookups.pop(request_id, None)
        self.adapter._lookup_status[request_id] = {"url": (self.answer(after_s), 0.0)}

    def waited_s(self, request_id):
        before_s = self.clock.now_s()
        heard = self.patience.wait(request_id)
        return heard, self.clock.now_s() - before_s


@pytest.fixture
def rig():
    return Rig()


def test_both_answers_are_waited_for_if_they_are_quick(rig):
    rig.asks("r", 0.0005)
    assert rig.waited_s("r") == (True, pytest.approx(0.0005))
    rig.is_asked_for_the_result("r", 0.001)
    assert rig.waited_s("r") == (True, pytest.approx(0.001))


def test_a_slow_answer_costs_its_request_one_wait_in_all(rig):
    rig.asks("r", 1.0)
    assert rig.waited_s("r") == (False, pytest.approx(MAX_WAIT_S))
    for _ in range(3):
        rig.patience.next_step()
        assert rig.waited_s("r") == (False, 0.0)
    rig.patience.forget("r")
    assert rig.waited_s("r")[1] > 0.0, "another request of that name"


def test_many_requests_share_one_wait_in_a_step(rig):
    for number in range(10):
        rig.asks(f"r{number}", 1.0)
    waits = [rig.waited_s(f"r{number}")[1] for number in range(10)]
    assert sum(waits) == pytest.approx(MAX_WAIT_S)
    rig.patience.next_step()
    assert rig.waited_s("r9") == (False, pytest.approx(MAX_WAIT_S))


def test_what_others_used_of_a_step_costs_a_request_nothing_later(rig):
    rig.asks("others", 0.9 * MAX_WAIT_S)
    assert rig.patience.wait("others")
    rig.asks("r", 1.0)
    assert rig.waited_s("r") == (False, pytest.approx(0.1 * MAX_WAIT_S))
    rig.patience.next_step()
    assert rig.waited_s("r")[1] > 0.5 * MAX_WAIT_S


def test_an_answer_of_every_server_is_waited_for(rig):
    rig.asks("r", 0.0002, 0.0005)
    assert rig.waited_s("r") == (True, pytest.approx(0.0005))
    rig.asks("s", 0.0002, 1.0)
    assert not rig.patience.wait("s")


def test_one_that_waits_for_the_disk_is_not_asked_for_ever(rig):
    """Each answer is that there is none yet, and comes at once."""
    heard = 0
    rig.is_asked_for_the_result("r", 0.0)
    while rig.patience.wait("r"):
        heard += 1
        assert heard < 20
    assert heard > 1


def test_nothing_is_waited_for_where_nothing_was_asked(rig):
    assert rig.waited_s("r") == (False, 0.0)
