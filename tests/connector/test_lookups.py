"""Lookups get on while the requests that asked are not asked for themselves."""

from collections import Counter
from types import SimpleNamespace

import pytest
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
        salts = SimpleNamespace(orphan_lookup=None, tracker_of=self._tracker)
        self.lookups = Lookups(inner, salts)

    def begin_early(self, *request_ids):
        for request_id in request_ids:
            self.lookups.begin_early(self.request(request_id))

    def match(self, request_id):
        return self.lookups.match(self.request(request_id), 0, 128)

    def request(self, request_id):
        return SimpleNamespace(request_id=request_id, num_tokens=128, block_hashes=[])

    def answer(self, request_id, chunks):
        """In a second each: that it was heard, and what was found."""
        for future, value in ((self.adapter.acks, None), (self.adapter.counts, chunks)):
            future[request_id].set_result(value)
            self.step()

    def step(self):
        self.clock.advance(1.0)
        self.lookups.next_step()

    def _tracker(self, request):
        new = SimpleNamespace(num_stored_tokens=0, num_lmcache_hit_tokens=0)
        return self.trackers.setdefault(request.request_id, new)

    def _look(self, request, hit_tokens):
        self.adapter.begin(request.request_id)
        found = self.adapter.check_lookup_result(request.request_id)
        return (None, True) if found is None else (found - hit_tokens, True)


@pytest.mark.parametrize("is_early", [False, True])
def test_an_answer_is_there_when_the_request_is_asked_for_once_more(is_early):
    """vLLM asks for it no more, or not yet: one before it finds no memory."""
    rig = Rig()
    if is_early:
        rig.begin_early("r")
    else:
        assert rig.match("r") == Match(None)
    rig.answer("r", chunks=3)
    rig.step()
    assert rig.match("r") == Match(3 * CHUNK, True)


def test_a_step_looks_at_some_and_the_next_one_at_the_others():
    rig = Rig()
    names = [f"r{n}" for n in range(LOOKS + 4)]
    rig.begin_early(*names)
    rig.step()
    assert sum(rig.adapter.looks.values()) == LOOKS
    rig.step()
    assert set(rig.adapter.looks) == set(names)


def test_nothing_is_asked_of_lookups_that_are_over():
    rig = Rig()
    rig.begin_early("gone", "cleaned")
    rig.lookups.end("gone")
    rig.adapter.cleanup_lookup_result("cleaned")
    rig.step()
    rig.step()
    assert rig.adapter.looks == {}
    assert rig.lookups._open == {}
