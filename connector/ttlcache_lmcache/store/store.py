"""Objects on disk, within a byte budget and for a time-to-live.

A file is written at once, so that a crash loses nothing that was reported stored. An
object that is locked, or being copied, stays. No lmcache here; all methods are
thread-safe, and no byte is copied while the lock is held.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ttlcache.clock import Clock
from ttlcache_lmcache.config import DiskConfig
from ttlcache_lmcache.store import disk_index, object_file
from ttlcache_lmcache.store.index import Entry, Index
from ttlcache_lmcache.store.object_file import CorruptRecordError, Header, Mark

_log = logging.getLogger(__name__)

#: Seconds between two looks at what was not used for long.
SWEEP_INTERVAL_S = 1.0
#: Seconds for which the time of a file's last use may be out of date.
STAMP_S = 5.0

#: Counted by name: what a disk did wrong, each a miss or a store that did not happen.
FAULTS = {
    "corrupt": "a file is not what was written, and is removed",
    "missing": "a file is gone",
    "read_errors": "a file cannot be read now",
    "write_errors": "a file cannot be written",
}

#: Told the keys of objects that went away by themselves.
OnRemoved = Callable[[Sequence[bytes]], None]


class DiskStore:
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
        config: DiskConfig,
        clock: Clock,
        on_removed: OnRemoved = lambda _gone: None,
        logger: logging.Logger = _log,
    ) -> None:
        self._config = config
        self._clock = clock
        self._on_removed = on_removed
        self._logger = logger
        self._lock = threading.Lock()
        self.counts: Counter[str] = Counter()
        folder = Path(config.path)
        self._index = Index(folder, config.disk_bytes)
        self._folder_lock = disk_index.lock_folder(folder)
        now_s = clock.now_s()
        found = disk_index.scan(folder, now_s, self._on_fault)
        self._index.restore(found, now_s - config.disk_ttl_s)
        self.counts["restored"] = len(self._index.entries)

    @property
    def used_bytes(self) -> int:
        """Of files."""
        return self._index.used_bytes

    # what callers ask

    def put(self, key: bytes, data: memoryview | bytes) -> bool:
        """Store an object; False if it could not be kept.

        A key names the tokens, so what is there under it is a use, though KV computed
        twice may differ in its last bits. One of another size is replaced, unless a
        load is promised or copying it: then False.
        """
        view = memoryview(data).cast("B")
        gone: list[Entry] = []
        with self._lock:
            old = self._index.entries.get(key)
            if old is not None:
                is_same = old.header.size == len(view) and old.is_readable
                if is_same and old.is_there:
                    self._index.use(old, self._clock.now_s())
                    return True
                if not old.is_movable:
                    return False
                gone.append(self._index.drop(old))
            header = Header(key, len(view), b"")  # the digest comes with the writing
            entry = Entry(header, self._clock.now_s(), busy=1)
            self._index.entries[key] = entry
        self._tell(gone)
        try:
            self._write(entry, view)
        finally:
            kept = self._release(entry)
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
            mark, entry.mark = entry.mark, None
        try:
            return self._read_file(entry, buffer, mark)
        finally:
            self._release(entry)

    def delete(self, keys: Sequence[bytes]) -> list[bytes]:
        """Remove objects that are not locked; which went."""
        with self._lock:
            found = (self._index.entries.get(key) for key in dict.fromkeys(keys))
            gone = [e for e in found if e is not None and e.is_there and not e.locks]
            for entry in gone:
                if entry.busy:
                    entry.is_doomed = True
                else:
                    self._index.drop(entry)
        return [entry.header.key for entry in gone]

    def headers(self) -> list[Header]:
        """Every object that is there."""
        with self._lock:
            return [e.header for e in self._index.entries.values() if e.is_there]

    def sweep(self) -> None:
        """Let time pass: what was not used for long goes."""
        used_before_s = self._clock.now_s() - self._config.disk_ttl_s
        gone: list[Entry] = []
        with self._lock:
            for entry in self._index.older(used_before_s):
                gone.append(self._index.drop(entry))
                self.counts["expired"] += 1
        self._tell(gone)

    def close(self) -> None:
        """Another process may use the folder."""
        self._folder_lock.close()

    def status(self) -> dict[str, object]:
        with self._lock:
            return {
                "objects": len(self._index.entries),
                "disk_objects": len(self._index.on_disk),
                "disk_bytes": self._index.used_bytes,
                "locked": sum(1 for e in self._index.entries.values() if e.locks),
                "counts": dict(self.counts),
            }

    # copies, and room for them

    def _write(self, entry: Entry, data: memoryview, *, again: bool = False) -> None:
        """Write the file of a busy entry, if there is room for it."""
        need = entry.header.file_bytes
        if not self._reserve(entry, need):
            return
        try:
            path, key = self._index.path(entry), entry.header.key
            header, mark = object_file.write(path, key, data)
        except OSError as error:
            # The file system may hold less than our bound.
            is_full = error.errno in (errno.ENOSPC, errno.EDQUOT) and not again
            with self._lock:
                self._index.used_bytes -= need
                gone = self._evict(need) if is_full else []
            self._on_fault("write_errors", error)
            self._tell(gone)
            if gone:
                self._write(entry, data, again=True)
            return
        with self._lock:
            entry.is_on_disk, entry.header, entry.mark = True, header, mark
            entry.stamped_s = entry.used_s
            self._index.on_disk[entry.header.key] = entry

    def _reserve(self, entry: Entry, need: int) -> bool:
        """Take bytes of the disk for a busy entry, for which the longest unused leave.

        The youngest bytes win: what is nowhere else is lost.
        """
        index = self._index
        with self._lock:
            if entry.is_dead or need > index.max_bytes:
                return False
            gone = self._evict(index.used_bytes + need - index.max_bytes)
            has_room = index.used_bytes + need <= index.max_bytes
            if has_room:
                index.used_bytes += need
        self._tell(gone)
        return has_room

    def _evict(self, num_bytes: int) -> list[Entry]:
        """Drop so much of the longest unused, or what there is. The caller locks."""
        gone: list[Entry] = []
        while num_bytes > 0 and (victim := self._index.oldest()) is not None:
            num_bytes -= victim.header.file_bytes
            self.counts["disk_evicted"] += 1
            gone.append(self._index.drop(victim))
        return gone

    def _read_file(self, entry: Entry, buffer: memoryview, mark: Mark | None) -> bool:
        """Copy a busy entry from its file; False for a miss.

        One that cannot be read now (too many open files, say) may be whole: it stays.
        """
        path = self._index.path(entry)
        try:
            mark = object_file.read_into(path, entry.header, buffer, mark)
            mark = self._stamp(entry, path, mark)
        except (OSError, CorruptRecordError) as error:
            gone: list[Entry] = []
            fault = object_file.fault_of(error)
            self._on_fault(fault, error, path)
            with self._lock:
                entry.is_readable = False
                if not entry.is_dead and fault != "read_errors":
                    gone.append(self._index.drop(entry))
            self._tell(gone)
            return False
        self.counts["disk_hits"] += 1
        with self._lock:  # another reader may be bringing pages up
            entry.is_readable = True
            entry.mark = mark if entry.busy == 1 else None
        return True

    @staticmethod
    def _stamp(entry: Entry, path: Path, mark: Mark) -> Mark | None:
        """A busy entry was used just now: its file's age survives a restart.

        Returns:
            The file's mark now, if it has one.
        """
        if entry.used_s - entry.stamped_s < STAMP_S:
            return mark
        entry.stamped_s = entry.used_s
        with contextlib.suppress(OSError):
            os.utime(path)
            return object_file.mark_of(path)
        return None

    def _release(self, entry: Entry) -> bool:
        """A copy is over; whether the object is there."""
        with self._lock:
            entry.busy -= 1
            if not (entry.busy or entry.is_there or entry.is_dead):
                self._index.drop(entry)
            return entry.is_there

    def _on_fault(self, name: str, error: Exception, path: Path | None = None) -> None:
        """Count a fault of the disk; the first of its kind is logged."""
        with self._lock:
            self.counts[name] += 1
            is_first = self.counts[name] == 1
        if is_first:
            self._logger.error(
                "ttlcache: disk tier: %s (%s: %s). Later ones are only counted, as %s",
                FAULTS[name],
                path or self._config.path,
                error,
                name,
            )

    def _tell(self, gone: Sequence[Entry]) -> None:
        """These left for good, by themselves."""
        if gone:
            self._on_removed([entry.header.key for entry in gone])


class StoreThreads:
    """Threads of a store: for puts, for gets (which wait for no puts), and to sweep."""

    def __init__(
        self, store: DiskStore, name: str, num_threads: int, logger: logging.Logger
    ) -> None:
        self._store = store
        self._logger = logger
        self.puts = ThreadPoolExecutor(num_threads, f"ttlcache-{name}-put")
        self.gets = ThreadPoolExecutor(num_threads, f"ttlcache-{name}-get")
        self._is_over = threading.Event()
        self._sweeper = threading.Thread(
            target=self._sweep, name=f"ttlcache-{name}-sweep", daemon=True
        )
        self._sweeper.start()

    @property
    def is_sweeping(self) -> bool:
        return self._sweeper.is_alive()

    def close(self) -> None:
        """Finish what was submitted, and close the store."""
        self._is_over.set()
        self._sweeper.join(timeout=10.0)
        self.puts.shutdown(wait=True)
        self.gets.shutdown(wait=True)
        self._store.close()

    def _sweep(self) -> None:
        while not self._is_over.wait(SWEEP_INTERVAL_S):
            try:
                self._store.sweep()
            except Exception:
                self._logger.exception("ttlcache: sweep failed")
