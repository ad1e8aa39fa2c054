"""What the lower tier keeps of lookups and salts; the real pair is in tests/e2e."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("lmcache", reason="the matrix of vLLM versions has no LMCache")

from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey

from ttlcache_connector.tiers.lmcache.orphaned_lookups import Forsaken
from ttlcache_connector.tiers.lmcache.salts import Epochs


class Adapter:
    """Answers a lookup when the test says so."""

    def __init__(self) -> None:
        self._pending_lookups = {"r"}
        self.found: int | None = None
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
    forsaken = Forsaken(adapter)
    forsaken.add("r", [1, 2, 3], "salt")
    adapter.cleanup_lookup_result("r")
    adapter.end_session("r")
    forsaken.settle()
    assert adapter.calls == []
    adapter.found = 2
    forsaken.settle()
    assert adapter.calls == [
        ("free", [1, 2, 3], 0, 2, "r", "salt"),
        ("clean up", "r"),
        ("end", "r"),
    ]
    assert len(forsaken) == 0
    adapter.end_session("r")  # nobody's any more
    assert adapter.calls[-1] == ("end", "r")


def test_what_has_ended_is_released_at_once():
    adapter = Adapter()
    adapter.found = 2
    Forsaken(adapter).add("r", [1, 2, 3], "")
    assert [call[0] for call in adapter.calls] == ["free", "clean up"]


def test_what_cannot_be_released_is_tried_once():
    adapter = Adapter()
    forsaken = Forsaken(adapter)
    forsaken.add("r", [1, 2, 3], "")
    adapter.found = 7
    with pytest.raises(RuntimeError):
        forsaken.settle()
    forsaken.settle()
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
    epochs = Epochs(inner, Forsaken(adapter))
    names = {epochs.salt(salt)}
    for _ in range(3):
        epochs.begin_anew()
        names.add(epochs.salt(salt))
        assert epochs.salt(salt) == epochs.salt(salt) != epochs.salt(salt + "2")
    assert len(names) == 4
    for name in names:
        assert name.isascii()  # it is sent
        assert len(name) <= IPCCacheServerKey._SALT_MAX_LEN
        assert IPCCacheServerKey._SALT_FORBIDDEN_CHARS.isdisjoint(name)
