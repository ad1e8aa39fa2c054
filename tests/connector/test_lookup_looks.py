"""Lookups get on while the requests that asked are not asked for themselves."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest

pytest.importorskip("lmcache", reason="the matrix of vLLM versions has no LMCache")

from lmcache.integration.vllm.vllm_multi_process_adapter import (
    LMCacheMPSchedulerAdapter,
    _LookupAck,
)
from lmcache.v1.multiprocess.futures import MessagingFuture

from ttlcache.clock import VirtualClock
from ttlcache_connector.tiers.base import Match
from ttlcache_connector.tiers.lmcache.lookups import LOOKS, Lookups

URL, CHUNK = "tcp://server", 32


class Adapter(LMCacheMPSchedulerAdapter):
    """LMCache's own, and in place of a server futures that a test answers."""

    is_healthy = True

    def __init__(self, clock):
        self.acks, self.counts, self.looks = {}, {}, Counter()
        self._clock = clock
        self._server_urls = [URL]
        self.req_clients = {URL: SimpleNamespace(query_prefetch_status=self._status)}
        self.lmcache_tokens_per_chunk = CHUNK
        self._mq_timeout, self._nonblocking_lookup_status = 1e9, True
        self._pending_lookups, self._unacked_lookups = set(), {}
        self._finished_lookup_results, self._per_server_hits = {}, {}
        self._lookup_status, self._lookup_params = {}, {}

    def begin(self, request_id):
        if request_id not in self._pending_lookups:
            self.acks[request_id] = MessagingFuture()
            futures = {URL: self.acks[request_id]}
            self._unacked_lookups[request_id] = _LookupAck(futures, 0.0)
            self._pending_lookups.add(request_id)

    def check_lookup_result(self, request_id):
        self.looks[request_id] += 1
        return super().check_lookup_result(request_id)

    def _status(self, request_id):
        return self.counts.setdefault(request_id, MessagingFuture())

    def _create_key(self, *args):
        raise AssertionError("no key is needed here")


class Rig:
    """Requests of 128 tokens of which GPU memory holds nothing."""

    def __init__(self):
        self.clock = VirtualClock()
        self.adapter = Adapter(self.clock)
        self.trackers = {}
        inner = SimpleNamespace(
            scheduler_adapter=self.adapter,
            request_trackers=self.trackers,
            on_new_request=lambda request: self.adapter.begin(request.request_id),
            get_num_new_matched_tokens=self._look,
        )
        self.given_back = []
        salts = SimpleNamespace(
            orphan_lookup=self.given_back.append, tracker_of=self._tracker
        )
        self.lookups = Lookups(inner, salts, self.clock.now_s)
        self.lookups._wait.for_answer = lambda request_id: False  # answers come later

    def request(self, request_id):
        return SimpleNamespace(request_id=request_id, num_tokens=128, block_hashes=[])

    def _tracker(self, request):
        new = SimpleNamespace(num_stored_tokens=0, num_lmcache_hit_tokens=0)
        return self.trackers.setdefault(request.request_id, new)

    def _look(self, request, hit_tokens):
        self.adapter.begin(request.request_id)
        found = self.adapter.check_lookup_result(request.request_id)
        return (None, True) if found is None else (found - hit_tokens, True)

    def step(self, seconds=1.0):
        self.clock.advance(seconds)
        self.lookups.next_step()


def test_an_answer_is_there_when_the_request_is_asked_for_once_more():
    rig = Rig()
    request = rig.request("r")
    assert rig.lookups.match(request, 0, 128) == Match(None)
    # vLLM asks for it no more: a request before it finds no memory. It is answered.
    rig.adapter.acks["r"].set_result(None)
    rig.step()
    rig.adapter.counts["r"].set_result(3)
    rig.step()
    rig.step(100.0)
    assert rig.lookups.match(request, 0, 128) == Match(3 * CHUNK, True, True)
    assert rig.lookups.took_s("r") == pytest.approx(2.0)  # not the 100 s of waiting


def test_a_lookup_at_arrival_gets_on_before_the_request_is_asked_for():
    rig = Rig()
    request = rig.request("r")
    rig.lookups.begin_early(request)
    rig.adapter.acks["r"].set_result(None)
    rig.step()
    rig.adapter.counts["r"].set_result(2)
    rig.step()
    assert rig.lookups.match(request, 0, 128) == Match(2 * CHUNK, True, True)
    assert rig.lookups.took_s("r") == 0.0  # nobody waited for it


def test_a_step_looks_at_some_and_the_next_one_at_the_others():
    rig = Rig()
    names = [f"r{n}" for n in range(LOOKS + 4)]
    for name in names:
        rig.lookups.begin_early(rig.request(name))
    rig.step()
    assert sum(rig.adapter.looks.values()) == LOOKS
    rig.step()
    assert set(rig.adapter.looks) == set(names)


def test_nothing_is_asked_of_lookups_that_are_over():
    rig = Rig()
    rig.lookups.begin_early(rig.request("gone"))
    rig.lookups.end("gone")
    rig.lookups.begin_early(rig.request("cleaned"))
    rig.adapter.cleanup_lookup_result("cleaned")
    rig.step()
    rig.step()
    assert rig.adapter.looks == {}
    assert rig.lookups._open == rig.lookups._answered_s == {}
