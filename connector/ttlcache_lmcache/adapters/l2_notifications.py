"""What LMCache's L2 listeners were told is there: each key once, in the right order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from lmcache.v1.distributed.api import ObjectKey

from ttlcache_lmcache.adapters.l2_keys import decode_key
from ttlcache_lmcache.store.object_file import Header

#: Told keys and their sizes.
Notify = Callable[[list[ObjectKey], list[int]], None]


class L2Notifications:
    """Compares what happened with what is there now: threads report in any order.

    Args:
        find: what is known of an object, None if it is not there.
    """

    def __init__(
        self,
        find: Callable[[bytes], Header | None],
        notify_stored: Notify,
        notify_deleted: Notify,
    ) -> None:
        self._find = find
        self._notify_stored = notify_stored
        self._notify_deleted = notify_deleted
        self._lock = threading.RLock()
        self._told: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._told)

    def stored(self, raws: Sequence[bytes]) -> None:
        """Objects were stored."""
        with self._lock:
            there = {raw: self._find(raw) for raw in dict.fromkeys(raws)}
            new = {
                raw: header.size
                for raw, header in there.items()
                if header is not None and raw not in self._told
            }
            if new:
                self._told.update(new)
                keys = [decode_key(raw) for raw in new]
                self._notify_stored(keys, list(new.values()))

    def removed(self, gone: Sequence[tuple[bytes, int]]) -> None:
        """Objects went away."""
        with self._lock:
            old = {
                raw: self._told.pop(raw)
                for raw, _ in gone
                if raw in self._told and self._find(raw) is None
            }
            if old:
                keys = [decode_key(raw) for raw in old]
                self._notify_deleted(keys, list(old.values()))
