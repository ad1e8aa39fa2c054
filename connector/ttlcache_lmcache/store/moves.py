"""To and from memory and disk: copies, and room for them.

No byte is copied while the lock is held: an entry is busy meanwhile.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from ttlcache_lmcache.config import TierConfig
from ttlcache_lmcache.store import object_file
from ttlcache_lmcache.store.index import Entry, Index, Place
from ttlcache_lmcache.store.object_file import CorruptRecordError

#: Seconds for which the time of a file's last use may be out of date.
STAMP_S = 5.0

#: Counted by name: what a disk did wrong, each a miss or a store that did not happen.
FAULTS = {
    "corrupt": "a file is not what was written, and is removed",
    "missing": "a file is gone",
    "read_errors": "a file cannot be read, and is removed",
    "write_errors": "a file cannot be written",
}

#: Told keys and sizes of objects that went away by themselves.
OnRemoved = Callable[[Sequence[tuple[bytes, int]]], None]


class Moves:
    """Moves the entries of one index, each place within its bytes. Takes the lock."""

    def __init__(
        self,
        config: TierConfig,
        index: Index,
        lock: threading.Lock,
        counts: Counter[str],
        on_removed: OnRemoved,
        logger: logging.Logger,
    ) -> None:
        self._config = config
        self._index = index
        self._lock = lock
        self._counts = counts
        self._on_removed = on_removed
        self._logger = logger

    def admit_to_memory(self, entry: Entry, data: memoryview) -> bool:
        """Copy a busy entry to memory; False if there is no room for it."""
        size = entry.header.size
        if not self._reserve(self._index.memory, entry, size):
            return False
        copy = bytes(data)
        with self._lock:
            if entry.data is not None or entry.is_dead:
                # Another thread was here meanwhile.
                self._index.memory.used_bytes -= size
                return entry.data is not None
            entry.data = copy
            self._index.memory.entries[entry.header.key] = entry
        return True

    def write(self, entry: Entry, data: memoryview) -> bool:
        """Write the file of a busy entry; False if there is no room for it."""
        need = entry.header.file_bytes
        if not self._reserve(self._index.disk, entry, need):
            return False
        try:
            object_file.write(self._index.path(entry), entry.header, data)
        except OSError as error:
            with self._lock:
                self._index.disk.used_bytes -= need
            self.on_fault("write_errors", error)
            return False
        with self._lock:
            entry.is_on_disk = True
            entry.stamped_s = entry.used_s
            self._index.disk.entries[entry.header.key] = entry
        return True

    def _reserve(self, place: Place, entry: Entry, need: int) -> bool:
        """Take bytes of a place for a busy entry, for which the longest unused leave.

        The youngest bytes win: what is nowhere else is lost.
        """
        index, gone = self._index, list[Entry]()
        with self._lock:
            if entry.is_dead or need > place.max_bytes:
                return False
            while place.used_bytes + need > place.max_bytes:
                victim = place.oldest()
                if victim is None:
                    break
                if place is index.disk:
                    self._counts["disk_evicted"] += 1
                    index.forget_disk(victim)
                else:
                    index.forget_memory(victim)
                if not victim.is_there:
                    gone.append(index.drop(victim))
            has_room = place.used_bytes + need <= place.max_bytes
            if has_room:
                place.used_bytes += need
        self.tell(gone)
        return has_room

    def read_file(self, entry: Entry, buffer: memoryview) -> bool:
        """Copy a busy entry from its file; False, and no file, if that is damaged."""
        path = self._index.path(entry)
        try:
            object_file.read_into(path, entry.header, buffer)
        except (OSError, CorruptRecordError) as error:
            gone: list[Entry] = []
            self.on_fault(_fault_of(error), error, path)
            with self._lock:
                if not entry.is_dead:
                    self._index.forget_disk(entry)
                    if entry.data is None:
                        gone.append(self._index.drop(entry))
            self.tell(gone)
            return False
        self._counts["disk_hits"] += 1
        self.stamp(entry)
        if entry.data is None and self._config.memory_bytes:
            self.admit_to_memory(entry, buffer)
        return True

    def stamp(self, entry: Entry) -> None:
        """A busy entry was used just now: its file's age survives a restart."""
        if entry.is_on_disk and entry.used_s - entry.stamped_s >= STAMP_S:
            entry.stamped_s = entry.used_s
            with contextlib.suppress(OSError):
                os.utime(self._index.path(entry))

    def release(self, entry: Entry) -> bool:
        """A copy is over; whether the object is there. Takes the lock itself."""
        with self._lock:
            entry.busy -= 1
            if not (entry.busy or entry.is_there or entry.is_dead):
                self._index.drop(entry)
            return entry.is_there

    def on_fault(self, name: str, error: Exception, path: Path | None = None) -> None:
        """Count a fault of the disk; the first of its kind is logged."""
        with self._lock:
            self._counts[name] += 1
            is_first = self._counts[name] == 1
        if is_first:
            self._logger.error(
                "ttlcache: disk tier: %s (%s: %s). Later ones are only counted, as %s",
                FAULTS[name],
                path or self._config.path,
                error,
                name,
            )

    def tell(self, gone: Sequence[Entry]) -> None:
        """These left for good, by themselves."""
        if gone:
            self._on_removed([(e.header.key, e.header.size) for e in gone])


def _fault_of(error: Exception) -> str:
    if isinstance(error, CorruptRecordError):
        return "corrupt"
    return "missing" if isinstance(error, FileNotFoundError) else "read_errors"
