"""LMCache's object keys as names of our objects, and what its listeners were told."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from lmcache.v1.distributed.api import ObjectKey

from ttlcache_lmcache.store.object_file import Header

_SEPARATOR = "@"  # LMCache keeps it out of model names and salts

#: Told keys and their sizes.
Notify = Callable[[list[ObjectKey], list[int]], None]


def encode_key(key: ObjectKey) -> bytes:
    parts = (
        key.chunk_hash.hex(),
        f"{key.kv_rank:x}",
        str(key.object_group_id),
        key.cache_salt,
        key.model_name,
    )
    return _SEPARATOR.join(parts).encode()


def decode_key(raw: bytes) -> ObjectKey:
    chunk_hash, rank, group, salt, model = raw.decode().split(_SEPARATOR)
    return ObjectKey(
        chunk_hash=bytes.fromhex(chunk_hash),
        model_name=model,
        kv_rank=int(rank, 16),
        object_group_id=int(group),
        cache_salt=salt,
    )


class L2Notifications:
    """Tells of each key once and in the right order, whatever order threads report in.

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
        self._told: dict[bytes, int] = {}  # with their sizes

    def stored(self, raws: Sequence[bytes]) -> None:
        """Objects were stored."""
        with self._lock:
            found = {raw: self._find(raw) for raw in raws if raw not in self._told}
            new = {raw: header.size for raw, header in found.items() if header}
            self._told |= new
            _tell(self._notify_stored, new)

    def removed(self, gone: Sequence[bytes]) -> None:
        """Objects went away."""
        with self._lock:
            gone = [raw for raw in gone if raw in self._told and not self._find(raw)]
            _tell(self._notify_deleted, {raw: self._told.pop(raw) for raw in gone})


def _tell(notify: Notify, objects: dict[bytes, int]) -> None:
    if objects:
        notify([decode_key(raw) for raw in objects], list(objects.values()))
