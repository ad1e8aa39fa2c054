"""From which tier a load came: asked until the server knows, and never guessed."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("lmcache")

from lmcache.integration.vllm.lmcache_mp_metadata import LMCacheMPWorkerMetadata

from ttlcache_connector.tiers.base import Reload
from ttlcache_connector.tiers.lmcache.load_sources import SOURCE_TIMEOUT_S, Sources
from ttlcache_connector.tiers.lmcache.reports import WorkerReport, load_times


class Server:
    """Answers each call with the next of `answers`; None is no answer yet."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.now_s = 0.0
        self.calls = 0
        adapter = SimpleNamespace(req_clients={0: self})
        self.sources = Sources(adapter, lambda: self.now_s)

    def server_module_call(self, request: Any) -> Any:
        self.calls += 1
        found = self.answers.pop(0) if self.answers else None
        answer = SimpleNamespace(
            success=found != "no module", payload=json.dumps(found).encode()
        )
        return SimpleNamespace(
            query=lambda: found is not None, result=lambda timeout: answer
        )


@pytest.mark.parametrize(
    ("found", "tier"), [({"cpu": 3}, "cpu"), ({"cpu": 1, "disk": 2}, "disk")]
)
def test_the_server_says_which(found, tier):
    server = Server(found)
    server.sources.ask("a", 64, 0.5)
    assert server.sources.known() == [Reload(tier, 64, 0.5)]
    assert server.sources.known() == []
    assert not server.sources.is_waiting


@pytest.mark.parametrize(
    ("found", "seconds"), [({"cpu": 3}, 0.5), ({"cpu": 1, "disk": 2}, 2.5)]
)
def test_the_wait_for_a_lookup_belongs_to_what_it_read_from_disk(found, seconds):
    server = Server(found)
    server.sources.ask("a", 64, 0.5, 2.0)
    assert [reload.seconds for reload in server.sources.known()] == [seconds]


def test_a_server_that_does_not_know_yet_is_asked_again():
    server = Server({}, {}, {"disk": 1})
    server.sources.ask("a", 64, 0.5)
    assert server.sources.known() == []
    assert server.sources.known() == []
    server.now_s = SOURCE_TIMEOUT_S + 1  # the answer is there: late, but known
    assert server.sources.known() == [Reload("disk", 64, 0.5)]
    assert server.calls == 3


@pytest.mark.parametrize("answers", [(), ({}, {})])
def test_what_it_never_says_stays_unknown(answers):
    server = Server(*answers)
    server.sources.ask("a", 64, 0.5)
    assert server.sources.known() == []
    assert server.sources.is_waiting
    server.now_s = SOURCE_TIMEOUT_S + 1
    assert server.sources.known() == [Reload(None, 64, 0.5)]
    assert not server.sources.is_waiting


def test_a_server_without_the_module_is_asked_once():
    server = Server("no module")
    for name in ("a", "b"):
        server.sources.ask(name, 64, 0.5)
        assert server.sources.known() == [Reload("cpu", 64, 0.5)]
    assert server.calls == 1


def test_the_slowest_rank_s_copy_counts():
    stores = LMCacheMPWorkerMetadata({"x": 1}, {"x"})
    first = WorkerReport.of(stores, {"a": 0.5, "b": 0.1})
    second = WorkerReport.of(None, {"a": 0.7})
    both = first.aggregate(second)
    assert load_times(both) == {"a": 0.7, "b": 0.1}
    assert both.completed_store_requests == {"x": 1}
    assert both.failed_store_requests == {"x"}
    assert load_times(first.aggregate(stores)) == {"a": 0.5, "b": 0.1}
    assert load_times(stores) == {}
