"""Our module inside LMCache's server, on LMCache's own memory and transfer."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("lmcache", reason="the matrix of vLLM versions has no LMCache")

from lmcache.v1.distributed.config import (
    EvictionConfig,
    L1ManagerConfig,
    L1MemoryManagerConfig,
    StorageManagerConfig,
)
from lmcache.v1.mp_observability.event import EventType
from lmcache.v1.multiprocess.custom_types import (
    IPCCacheServerKey,
    RegisterEngineDrivenContextPayload,
)
from lmcache.v1.multiprocess.engine_context import MPCacheServerContext
from lmcache.v1.multiprocess.modules.engine_driven_transfer import (
    EngineDrivenTransferModule,
)
from lmcache.v1.multiprocess.modules.lookup import LookupModule
from lmcache.v1.multiprocess.request_handler import iter_request_handlers

from ttlcache_connector.lmcache_server.mid_context_lookup import heed_starts
from ttlcache_connector.lmcache_server.module import build_server_modules

CHUNK = 16
WORKER = 7


class Server:
    """Memory, transfer and our module, without a socket."""

    def __init__(self) -> None:
        memory = L1MemoryManagerConfig(
            size_in_bytes=1 << 20,
            use_lazy=False,
            shm_name=f"lmcache_l1_pool_test_{uuid.uuid4().hex[:8]}",
        )
        self.context = MPCacheServerContext(
            StorageManagerConfig(
                l1_manager_config=L1ManagerConfig(memory_config=memory),
                eviction_config=EvictionConfig(eviction_policy="LRU"),
            ),
            chunk_size=CHUNK,
        )
        self.transfer = EngineDrivenTransferModule(self.context)
        self.lookups = LookupModule(self.context)
        self.ours = build_server_modules(
            SimpleNamespace(
                server_context=self.context,
                modules=(self.transfer, self.lookups),
                config={},
            )
        )
        self.register()

    def register(self) -> None:
        self.transfer.register_kv_cache_engine_driven_context(
            RegisterEngineDrivenContextPayload(
                instance_id=WORKER,
                model_name="model",
                world_size=1,
                block_size=CHUNK,
                num_layers=2,
                hidden_dim_size=8,
                dtype_str="float32",
                use_mla=False,
                num_physical_slots=CHUNK,
            )
        )

    def prepare(self, request_id: str) -> IPCCacheServerKey:
        """A worker gets slots for two chunks."""
        first = ord(request_id) * 1000
        tokens = tuple(range(first, first + 2 * CHUNK))
        key = IPCCacheServerKey("model", 1, 0, tokens, 0, len(tokens), request_id)
        answer = self.transfer.prepare_store(key, WORKER)
        assert len(answer.context["slots"]) == 2
        return key

    def commit(self, key: IPCCacheServerKey) -> None:
        assert self.transfer.commit_store(key, WORKER, b"")

    def store(self, key: IPCCacheServerKey, start: int, end: int) -> None:
        """A worker stores these chunks of a context."""
        part = replace(key, worker_id=0, start=start * CHUNK, end=end * CHUNK)
        self.transfer.prepare_store(part, WORKER)
        self.commit(part)

    def look_up(self, key: IPCCacheServerKey, start: int) -> int:
        """Chunks found by a lookup that begins with this one, from the first on."""
        self.lookups.lookup(replace(key, start=start * CHUNK), 1)
        deadline = time.monotonic() + 10.0
        while time.monotonic() < deadline:
            found = self.lookups.query_prefetch_status(key.request_id)
            if found is not None:
                return found
            time.sleep(0.01)
        raise AssertionError("no answer")

    def unlock(self, key: IPCCacheServerKey, end: int) -> None:
        """As LMCache's connector does it: from the beginning of the context."""
        self.lookups.free_lookup_locks(replace(key, start=0, end=end * CHUNK), 1)

    def locked(self, key: IPCCacheServerKey) -> list[int]:
        """Chunks of a context that are there, and that some lookup locks."""
        (manager,) = self.context.storage_manager._l1_managers_by_id.values()
        asked = replace(key, worker_id=0, request_id="test")  # a session of its own
        keys = self.context.resolve_obj_keys(asked, [0])[0]
        entries = [manager._objects.get(each) for each in keys]
        return [i for i, e in enumerate(entries) if e and e.read_lock.is_locked()]

    def readable(self, key: IPCCacheServerKey) -> int:
        """Chunks that a lookup would find."""
        keys = self.context.resolve_obj_keys(key, [0])[0]
        (manager,) = self.context.storage_manager._l1_managers_by_id.values()
        found = manager.reserve_read(keys)
        good = [k for k, (error, _) in found.items() if error.name == "SUCCESS"]
        manager.finish_read(good)
        return len(good)


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.context.close()


def leave(server: Server) -> None:
    server.transfer.unregister_kv_cache(WORKER)


def die(server: Server) -> None:
    server.transfer._engine_driven_contexts[WORKER].last_seen = float("-inf")
    assert server.transfer.reap_stale_instances(1.0, 1.0) == [WORKER]


@pytest.mark.parametrize("go", [leave, die])
def test_what_a_worker_never_wrote_is_nobodys_hit(server: Server, go: Any):
    """A worker that leaves or dies between the slots and its commit."""
    whole, torn = server.prepare("a"), server.prepare("b")
    server.commit(whole)
    assert (server.readable(whole), server.readable(torn)) == (2, 0)
    go(server)
    assert (server.readable(whole), server.readable(torn)) == (2, 0)


def context_of(request_id: str, chunks: int = 6) -> IPCCacheServerKey:
    """What a scheduler asks for."""
    tokens = tuple(range(chunks * CHUNK))
    return IPCCacheServerKey(
        "model", 1, None, tokens, 0, len(tokens), request_id, num_kv_readers=1
    )


def test_a_lookup_begins_where_its_key_does(server):
    """And answers where what it found ends, as LMCache's own do."""
    server.store(context_of("worker"), 2, 4)
    assert server.look_up(context_of("from-the-start"), 0) == 0
    tail = context_of("tail")
    assert server.look_up(tail, 1) == 0
    assert server.locked(tail) == []
    assert server.look_up(tail, 2) == 4
    assert server.locked(tail) == [2, 3]
    server.unlock(tail, 4)
    assert server.locked(tail) == []
    assert server.look_up(tail, 3) == 4
    assert server.locked(tail) == [3]


def test_a_release_takes_nobody_elses_locks(server):
    """LMCache counts them, and does not ask whose they are."""
    server.store(context_of("worker"), 0, 4)
    whole, tail = context_of("whole"), context_of("tail")
    assert server.look_up(whole, 0) == 4
    assert server.look_up(tail, 2) == 4
    server.unlock(tail, 4)
    assert server.locked(whole) == [0, 1, 2, 3]
    server.unlock(whole, 4)
    assert server.locked(whole) == []


def test_a_release_that_comes_before_the_answer_was_asked_for(server):
    server.store(context_of("worker"), 2, 4)
    tail = context_of("tail")
    server.lookups.lookup(replace(tail, start=2 * CHUNK), 1)
    deadline = time.monotonic() + 10.0
    while server.locked(tail) != [2, 3]:
        assert time.monotonic() < deadline
    while server.locked(tail):
        assert time.monotonic() < deadline
        server.unlock(tail, 4)


def test_what_is_told_of_a_lookup_names_the_whole_context(server, monkeypatch):
    """Its hit rate is about what was looked for; retention knows programs by chains."""
    events = {}
    monkeypatch.setattr(
        server.context.event_bus,
        "publish",
        lambda event: events.setdefault(event.event_type, event.metadata),
    )
    monkeypatch.setattr(server.context.event_bus, "has_subscribers", lambda _: True)
    server.store(context_of("worker"), 2, 4)
    assert server.look_up(context_of("tail"), 2) == 4
    assert len(events[EventType.MP_LOOKUP]["chunk_hashes"]) == 6
    end = events[EventType.MP_LOOKUP_PREFETCH_END]
    assert (end["requested_tokens"], end["hit_tokens"]) == (4 * CHUNK, 2 * CHUNK)


def test_a_lookup_about_nothing_finds_nothing(server):
    """A prompt that ends where GPU memory does, to a chunk."""
    server.store(context_of("worker"), 0, 6)
    nothing = context_of("nothing")
    assert server.look_up(nothing, 6) == 0
    assert server.locked(nothing) == []
    assert server.look_up(nothing, 5) == 6


def test_lmcache_calls_our_lookups_by_its_own_names(server):
    """It finds handlers by their signatures, after our module was built."""
    handlers = {h.operation: h.handler for h in iter_request_handlers(server.lookups)}
    assert handlers["lookup"] is server.lookups.__dict__["lookup"]
    assert handlers["free_lookup_locks"] is server.lookups.__dict__["free_lookup_locks"]


def test_another_lmcache_keeps_its_lookups():
    class LookupModule:
        lookup = None

    assert not heed_starts([LookupModule(), object()])


@pytest.mark.parametrize("heeds", [True, False])
def test_the_connector_is_told_where_lookups_begin(server, heeds):
    server.ours._heeds_starts = heeds
    told = json.loads(server.ours.lookups_begin_anywhere(b""))
    _, cpu_bytes = server.context.storage_manager.get_l1_usage()
    assert cpu_bytes > 0
    assert told == ({"cpu_bytes": cpu_bytes} if heeds else None)
