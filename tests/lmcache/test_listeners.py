"""LMCache's own events and sessions, and what the tier hears of them."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("lmcache", reason="LMCache is an extra")

from lmcache.v1.mp_observability.event import Event, EventType
from lmcache.v1.mp_observability.event_bus import EventBus, EventBusConfig
from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey
from lmcache.v1.multiprocess.session import SessionManager
from lmcache.v1.multiprocess.token_hasher import TokenHasher

from tests.lmcache.test_tier import Key, World
from ttlcache_lmcache.adapters.listeners import RequestEvents
from ttlcache_lmcache.retention.program_table import LOST_S

CHUNK = 4


class Server:
    """LMCache's sessions, its bus without the thread, and our tier."""

    def __init__(self) -> None:
        self.world = World()
        self.errors: list[BaseException] = []
        self.sessions = SessionManager(TokenHasher(CHUNK), cleanup_interval=None)
        self.bus = EventBus(EventBusConfig(enabled=True))
        events = RequestEvents(
            self.world.tier, self.salt_of, lambda _, error: self.errors.append(error)
        )
        events.subscribe(self.bus, self.sessions.destroy_listeners)

    def salt_of(self, request_id: str) -> str | None:
        session = self.sessions.get(request_id)
        key = session.lookup_ipc_key if session is not None else None
        return None if key is None else key.cache_salt

    def tell(self, kind: EventType, request_id: str, **metadata: Any) -> None:
        event = Event(event_type=kind, session_id=request_id, metadata=metadata)
        for handler in self.bus._subscribers[kind]:
            handler(event)

    def end(self, request_id: str) -> None:
        self.tell(EventType.MP_REQUEST_END, request_id)

    def lookup(self, request_id: str) -> None:
        about = {"model_name": "m", "chunk_hashes": [b"a", b"ab"]}
        self.tell(EventType.MP_LOOKUP, request_id, seq_len=2 * CHUNK, **about)

    def begin(self, request_id: str) -> None:
        """A session, and the lookup that it belongs to."""
        session = self.sessions.get_or_create(request_id)
        session.begin_lookup(key(request_id), (0,))
        self.lookup(request_id)

    def spaces(self) -> list[str]:
        return [each.chain[0][0] for each in self.world.tier._book.programs()]

    def running(self) -> Any:
        return self.world.tier.status()["programs_running"]


def key(request_id: str, worker: int | None = None) -> IPCCacheServerKey:
    tokens = tuple(range(2 * CHUNK))
    return IPCCacheServerKey("m", 1, worker, tokens, 0, 2 * CHUNK, request_id, "x")


@pytest.fixture
def server():
    made = Server()
    yield made
    assert made.errors == []


def test_a_lookups_salt_is_its_sessions(server):
    server.begin("r1")
    assert server.spaces() == ["m@x"]


def test_a_lookup_that_is_ahead_of_its_session_waits_for_its_salt(server):
    server.lookup("r1")
    assert server.spaces() == []
    server.tell(EventType.MP_LOOKUP_PREFETCH_END, "r1", cache_salt="x")
    assert server.spaces() == ["m@x"]
    # One that is over before anybody said its salt is not waited for.
    server.lookup("r2")
    server.end("r2")
    server.tell(EventType.MP_LOOKUP_PREFETCH_END, "r2", cache_salt="x")
    assert server.spaces() == ["m@x"]


@pytest.mark.parametrize("looked_up", [False, True])
def test_a_session_that_only_stored_is_a_turn(server, looked_up):
    """LMCache notes a store's key where a lookup's would be."""
    session = server.sessions.get_or_create("r1")
    session.set_tokens(list(range(2 * CHUNK)))
    if looked_up:
        session.begin_lookup(key("r1"), (0,))
    session.lookup_ipc_key = key("r1", worker=0).no_worker_id_version()
    hashes = [TokenHasher.hash_to_bytes(each) for each in session.get_hashes(0)]
    tier = server.world.tier
    objects = [Key(each, cache_salt="x") for each in hashes]
    tier.reserved(objects)
    tier.written(objects)
    server.sessions.remove("r1")
    assert server.spaces() == ([] if looked_up else ["m@x"])


def test_requests_of_an_engine_that_died_do_not_run_for_ever(server):
    """LMCache clears their sessions away, and its bus says nothing."""
    server.begin("r1")
    server.sessions.remove("r1")
    assert server.running() == 1  # its bus may be late
    server.world.clock.advance(LOST_S)
    assert server.running() == 0
    # The engine that comes next goes on with the program.
    server.begin("r2")
    assert (server.running(), server.world.continued()) == (1, (1, 1))
    server.end("r2")
    assert server.running() == 0


@pytest.mark.parametrize("is_over", [None, False, True])
def test_a_request_that_outlives_its_session_is_over_when_it_says_so(server, is_over):
    """LMCache clears sessions away after ten minutes; and maybe there is a hint."""
    server.begin("r1")
    server.sessions.remove("r1")
    server.world.clock.advance(LOST_S + 100.0)
    if is_over is not None:
        server.world.hint("r1", ttl_s=30.0, is_over=is_over)
    server.end("r1")
    (shown,) = server.world.tier.recent_turns()
    expected = 0.0 if is_over is None else 30.0
    assert shown["left_s"] == shown["ttl_s"] == expected
