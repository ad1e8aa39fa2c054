"""Lookups whose request has left, and salts of keys at LMCache."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey

from ttlcache_connector.tiers.lmcache.orphaned_lookups import OrphanedLookups
from ttlcache_connector.tiers.lmcache.salts import SaltGenerations


class Adapter:
    """Answers a lookup when the test says so."""

    def __init__(self, found: int | None = None) -> None:
        self._pending_lookups = {"r"}
        self._unacked_lookups: dict[str, Any] = {}
        self._lookup_status: dict[str, Any] = {"r": {}}
        self.is_healthy = True
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


def test_what_a_late_server_has_locked_is_released_once_it_answers():
    """LMCache answers 0 for a server that it gave up; its locks last half an hour."""
    adapter = Adapter(found=0)
    adapter.is_healthy = False
    orphans = OrphanedLookups(adapter)
    orphans.add("r", [1, 2, 3], "salt")
    adapter.cleanup_lookup_result("r")
    orphans.settle()
    assert adapter.calls == []
    assert not adapter._lookup_status  # an answer from before, which may never come
    adapter.is_healthy, adapter.found = True, 2
    orphans.settle()
    released = ("free", [1, 2, 3], 0, 2, "r", "salt")
    assert adapter.calls == [released, ("clean up", "r")]
    assert len(orphans) == 0


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
