"""Objects in memory and on disk, each within a byte budget, both for a time-to-live.

A file is written at once, so that a crash loses nothing that was reported stored, and
leaving memory costs nothing. An object that is locked, or being copied, stays where it
is. No lmcache here; all methods are thread-safe, and no byte is copied while the lock
is held.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from ttlcache.clock import Clock
from ttlcache_lmcache.config import TierConfig
from ttlcache_lmcache.store import disk_index, object_file
from ttlcache_lmcache.store.index import Entry, Index
from ttlcache_lmcache.store.moves import Moves, OnRemoved
from ttlcache_lmcache.store.object_file import Header

_log = logging.getLogger(__name__)


class TieredStore:
    """See the module's docstring.

    Args:
        on_removed: called without the lock for everything that leaves for good
            other than by `delete`.
        logger: gets the first fault of the disk of each kind.

    Raises:
        ConfigError: the folder cannot be used, or another process uses it.
    """

    def __init__(
        self,
        config: TierConfig,
        clock: Clock,
        on_removed: OnRemoved = lambda _gone: None,
        logger: logging.Logger = _log,
    ) -> None:
        self._config = config
        self._clock = clock
        self._lock = threading.Lock()
        self.counts: Counter[str] = Counter()
        folder = Path(config.path)
        self._index = Index(folder, config.memory_bytes, config.disk_bytes)
        self._moves = Moves(
            config, self._index, self._lock, self.counts, on_removed, logger
        )
        self._folder_lock = disk_index.lock_folder(folder)
        if config.disk_bytes:
            found = disk_index.scan(folder, self._moves.on_fault)
            self._index.restore(found, clock.now_s(), config.disk_ttl_s)
            self.counts["restored"] = len(self._index.entries)

    @property
    def memory_bytes(self) -> int:
        return self._index.memory.used_bytes

    @property
    def disk_bytes(self) -> int:
        return self._index.disk.used_bytes

    # what callers ask

    def put(self, key: bytes, data: memoryview | bytes, meta: bytes = b"") -> bool:
        """Store an object; False if it could not be kept anywhere.

        The same bytes under the same key are a use. Other bytes replace the old
        ones, unless somebody is promised or copying those: then False.
        """
        view = memoryview(data).cast("B")
        header = Header(key, meta, len(view), object_file.digest_of(view))
        gone: list[Entry] = []
        with self._lock:
            old = self._index.entries.get(key)
            if old is not None:
                if old.header == header and old.is_there:
                    self._index.use(old, self._clock.now_s())
                    return True
                if not old.is_movable:
                    return False
                gone.append(self._index.drop(old))
            entry = Entry(header, self._clock.now_s(), busy=1)
            self._index.entries[key] = entry
        self._moves.tell(gone)
        try:
            self._moves.admit_to_memory(entry, view)
            self._moves.write(entry, view)
        finally:
            kept = self._moves.release(entry)
        self.counts["stored" if kept else "not_stored"] += 1
        return kept

    def lock(self, keys: Sequence[bytes]) -> list[bool]:
        """Promise objects to a load that follows; which of them are there."""
        with self._lock:
            return [self._lock_one(key) for key in keys]

    def _lock_one(self, key: bytes) -> bool:
        entry = self._index.entries.get(key)
        if entry is None or not entry.is_there:
            return False
        entry.locks += 1
        self._index.use(entry, self._clock.now_s())
        return True

    def unlock(self, keys: Sequence[bytes]) -> None:
        with self._lock:
            for key in keys:
                entry = self._index.entries.get(key)
                if entry is not None and entry.locks:
                    entry.locks -= 1

    def find(self, key: bytes) -> Header | None:
        """What is known of an object; None if it is not there."""
        with self._lock:
            entry = self._index.entries.get(key)
            return entry.header if entry is not None and entry.is_there else None

    def read_into(self, key: bytes, buffer: memoryview) -> bool:
        """Copy an object into `buffer`; False (and garbage in it) for a miss.

        A buffer of another size is a miss, as is a file that is not what was
        written: that one is removed.
        """
        buffer = buffer.cast("B")
        with self._lock:
            entry = self._index.entries.get(key)
            if entry is None or not entry.is_there or entry.header.size != len(buffer):
                self.counts["misses"] += 1
                return False
            entry.busy += 1
            self._index.use(entry, self._clock.now_s())
            data = entry.data
        try:
            if data is not None:
                buffer[:] = data
                self.counts["memory_hits"] += 1
                self._moves.stamp(entry)
                return True
            return self._moves.read_file(entry, buffer)
        finally:
            self._moves.release(entry)

    def delete(self, keys: Sequence[bytes]) -> list[tuple[bytes, int]]:
        """Remove objects that are not locked; which went, and their sizes."""
        with self._lock:
            found = (self._index.entries.get(key) for key in dict.fromkeys(keys))
            gone = [e for e in found if e is not None and e.is_there and not e.locks]
            for entry in gone:
                if entry.busy:
                    entry.is_doomed = True
                else:
                    self._index.drop(entry)
        return [(entry.header.key, entry.header.size) for entry in gone]

    def headers(self) -> list[Header]:
        """Every object that is there."""
        with self._lock:
            return [e.header for e in self._index.entries.values() if e.is_there]

    def sweep(self) -> None:
        """Let time pass: what was not used for long goes."""
        used_before_s = self._clock.now_s() - self._config.disk_ttl_s
        gone: list[Entry] = []
        with self._lock:
            for place in (self._index.memory, self._index.disk):
                for entry in place.older(used_before_s):
                    gone.append(self._index.drop(entry))
                    self.counts["expired"] += 1
        self._moves.tell(gone)

    def close(self) -> None:
        """Another process may use the folder."""
        disk_index.unlock_folder(self._folder_lock)

    def status(self) -> dict[str, object]:
        with self._lock:
            return {
                "objects": len(self._index.entries),
                "memory_objects": len(self._index.memory.entries),
                "disk_objects": len(self._index.disk.entries),
                "memory_bytes": self.memory_bytes,
                "disk_bytes": self.disk_bytes,
                "locked": sum(1 for e in self._index.entries.values() if e.locks),
                "counts": dict(self.counts),
            }
