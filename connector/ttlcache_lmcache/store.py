"""Objects in memory and on disk, each within a byte budget and a time-to-live.

    put ─ memory ─ idle for `memory_ttl_s`, or room wanted → disk
        ─ disk   ─ idle for `disk_ttl_s`, or room wanted   → gone

With `write_through` the file is written at once and leaving memory costs nothing.
An object that is locked, or being copied, stays where it is. No lmcache here; all
methods are thread-safe, and no byte is copied while the lock is held.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ttlcache.clock import Clock
from ttlcache_lmcache import disk_index, records
from ttlcache_lmcache.config import TierConfig
from ttlcache_lmcache.records import CorruptRecordError, Header


@dataclass(slots=True, eq=False)
class _Entry:
    """One object. Visible once it is in memory or on disk.

    locks: lookups that promised it to a load.
    busy: copies under way; none of its places may be given up meanwhile.
    is_doomed: deleted while it was copied; goes when that is over. Until then its
        key, and so its file's name, is nobody else's.
    is_dead: dropped.
    """

    header: Header
    used_s: float
    data: bytes | None = None
    is_on_disk: bool = False
    locks: int = 0
    busy: int = 0
    is_doomed: bool = False
    is_dead: bool = False

    @property
    def is_there(self) -> bool:
        return not self.is_doomed and (self.data is not None or self.is_on_disk)

    @property
    def is_movable(self) -> bool:
        return not (self.locks or self.busy)


#: Told keys and sizes of objects that went away by themselves.
OnRemoved = Callable[[Sequence[tuple[bytes, int]]], None]


class TieredStore:
    """See the module's docstring.

    Args:
        on_removed: called without the lock for everything that leaves for good
            other than by `delete`.

    Raises:
        ConfigError: the folder cannot be used, or another process uses it.
    """

    def __init__(
        self,
        config: TierConfig,
        clock: Clock,
        on_removed: OnRemoved = lambda _gone: None,
    ) -> None:
        self._config = config
        self._clock = clock
        self._on_removed = on_removed
        self._folder = Path(config.path)
        self._lock = threading.Lock()
        self._entries: dict[bytes, _Entry] = {}
        self._memory: OrderedDict[bytes, _Entry] = OrderedDict()  # by last use
        self._disk: OrderedDict[bytes, _Entry] = OrderedDict()
        self.memory_bytes = 0
        self.disk_bytes = 0
        self.counts: Counter[str] = Counter()
        self._folder_lock = disk_index.lock_folder(self._folder)
        if config.disk_bytes:
            self._restore()

    # what callers ask

    def put(self, key: bytes, data: memoryview | bytes, meta: bytes = b"") -> bool:
        """Store an object; False if it could not be kept anywhere.

        The same bytes under the same key are a use. Other bytes replace the old
        ones, unless somebody is promised or copying those: then False.
        """
        view = memoryview(data).cast("B")
        header = Header(key, meta, len(view), records.digest_of(view))
        gone: list[_Entry] = []
        with self._lock:
            old = self._entries.get(key)
            if old is not None:
                if old.header == header and old.is_there:
                    self._use(old)
                    return True
                if not old.is_movable:
                    return False
                gone.append(self._drop(old))
            entry = _Entry(header, self._clock.now_s(), busy=1)
            self._entries[key] = entry
        self._tell(gone)
        try:
            in_memory = self._admit_to_memory(entry, view)
            if self._config.write_through or not in_memory:
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
        entry = self._entries.get(key)
        if entry is None or not entry.is_there:
            return False
        entry.locks += 1
        self._use(entry)
        return True

    def unlock(self, keys: Sequence[bytes]) -> None:
        with self._lock:
            for key in keys:
                entry = self._entries.get(key)
                if entry is not None and entry.locks:
                    entry.locks -= 1

    def find(self, key: bytes) -> Header | None:
        """What is known of an object; None if it is not there."""
        with self._lock:
            entry = self._entries.get(key)
            return entry.header if entry is not None and entry.is_there else None

    def read_into(self, key: bytes, buffer: memoryview) -> bool:
        """Copy an object into `buffer`; False (and garbage in it) for a miss.

        A buffer of another size is a miss, as is a file that is not what was
        written: that one is removed.
        """
        buffer = buffer.cast("B")
        with self._lock:
            entry = self._entries.get(key)
            if entry is None or not entry.is_there or entry.header.size != len(buffer):
                self.counts["misses"] += 1
                return False
            entry.busy += 1
            self._use(entry)
            data = entry.data
        try:
            if data is not None:
                buffer[:] = data
                self.counts["memory_hits"] += 1
                return True
            return self._read_file(entry, buffer)
        finally:
            self._release(entry)

    def delete(self, keys: Sequence[bytes]) -> list[tuple[bytes, int]]:
        """Remove objects that are not locked; which went, and their sizes."""
        with self._lock:
            found = (self._entries.get(key) for key in dict.fromkeys(keys))
            gone = [e for e in found if e is not None and e.is_there and not e.locks]
            for entry in gone:
                if entry.busy:
                    entry.is_doomed = True
                else:
                    self._drop(entry)
        return [(entry.header.key, entry.header.size) for entry in gone]

    def headers(self) -> list[Header]:
        """Every object that is there."""
        with self._lock:
            return [e.header for e in self._entries.values() if e.is_there]

    def sweep(self) -> None:
        """Let time pass: memory to disk, disk to nothing."""
        now_s = self._clock.now_s()
        gone: list[_Entry] = []
        with self._lock:
            for tier in (self._memory, self._disk):
                for entry in self._older(tier, now_s - self._config.disk_ttl_s):
                    gone.append(self._drop(entry))
                    self.counts["expired"] += 1
        self._tell(gone)
        while self._demote_one(now_s - self._config.memory_ttl_s):
            pass

    @staticmethod
    def _older(tier: OrderedDict[bytes, _Entry], used_before_s: float) -> list[_Entry]:
        """Objects to give up for age. What a demotion put behind younger ones is
        found a little later."""
        found = []
        for entry in tier.values():
            if entry.used_s > used_before_s:
                break
            if entry.is_movable:
                found.append(entry)
        return found

    def close(self) -> None:
        """Bring to disk what is in memory only, as far as it fits."""
        if self._config.disk_bytes:
            while self._demote_one(float("inf")):
                pass
        disk_index.unlock_folder(self._folder_lock)

    def status(self) -> dict[str, object]:
        with self._lock:
            return {
                "objects": len(self._entries),
                "memory_objects": len(self._memory),
                "disk_objects": len(self._disk),
                "memory_bytes": self.memory_bytes,
                "disk_bytes": self.disk_bytes,
                "locked": sum(1 for e in self._entries.values() if e.locks),
                "counts": dict(self.counts),
            }

    # memory

    def _admit_to_memory(self, entry: _Entry, data: memoryview) -> bool:
        size = entry.header.size
        while True:
            with self._lock:
                if entry.is_dead or size > self._config.memory_bytes:
                    return False
                if entry.data is not None:
                    return True
                if self.memory_bytes + size <= self._config.memory_bytes:
                    self.memory_bytes += size  # reserved before it is taken
                    break
            if not self._demote_one(float("inf")):
                return False
        copy = bytes(data)
        with self._lock:
            if entry.data is not None or entry.is_dead:
                self.memory_bytes -= size
                return entry.data is not None
            entry.data = copy
            self._memory[entry.header.key] = entry
        return True

    def _demote_one(self, used_before_s: float) -> bool:
        """Free memory of the longest idle object; False if there is none to free.

        Without room on disk it is lost: the youngest bytes win.
        """
        with self._lock:
            entry = next((e for e in self._memory.values() if e.is_movable), None)
            if entry is None or entry.used_s > used_before_s:
                return False
            if entry.is_on_disk or not self._config.disk_bytes:
                if used_before_s < float("inf") and not entry.is_on_disk:
                    return False  # nowhere to go, and nobody needs the room
                self._forget_memory(entry)
                gone = [] if entry.is_on_disk else [self._drop(entry)]
                data = None
            else:
                gone, data = [], entry.data
                entry.busy += 1
        if data is not None:
            self._write(entry, memoryview(data))
            with self._lock:
                self._forget_memory(entry)
                self.counts["demoted"] += entry.is_on_disk
                if not entry.is_on_disk and not entry.is_dead:
                    gone.append(self._drop(entry))
            self._release(entry)
        self._tell(gone)
        return True

    def _forget_memory(self, entry: _Entry) -> None:
        if entry.data is not None:
            entry.data = None
            self.memory_bytes -= entry.header.size
            self._memory.pop(entry.header.key, None)

    # disk

    def _write(self, entry: _Entry, data: memoryview) -> bool:
        """Write the file of a busy entry; False if there is no room for it."""
        need = entry.header.file_bytes
        if not self._reserve_disk(entry, need):
            return False
        try:
            records.write(self._path(entry), entry.header, data)
        except OSError:
            with self._lock:
                self.disk_bytes -= need
                self.counts["write_errors"] += 1
            return False
        with self._lock:
            entry.is_on_disk = True
            self._disk[entry.header.key] = entry
        return True

    def _reserve_disk(self, entry: _Entry, need: int) -> bool:
        gone: list[_Entry] = []
        with self._lock:
            if entry.is_dead or need > self._config.disk_bytes:
                return False
            while self.disk_bytes + need > self._config.disk_bytes:
                oldest = next((e for e in self._disk.values() if e.is_movable), None)
                if oldest is None:
                    break
                self.counts["disk_evicted"] += 1
                self._forget_disk(oldest)
                if oldest.data is None:
                    gone.append(self._drop(oldest))
            has_room = self.disk_bytes + need <= self._config.disk_bytes
            if has_room:
                self.disk_bytes += need
        self._tell(gone)
        return has_room

    def _read_file(self, entry: _Entry, buffer: memoryview) -> bool:
        path = self._path(entry)
        try:
            records.read_into(path, entry.header, buffer)
        except (OSError, CorruptRecordError):
            gone: list[_Entry] = []
            with self._lock:
                self.counts["corrupt"] += 1
                if not entry.is_dead:
                    self._forget_disk(entry)
                    if entry.data is None:
                        gone.append(self._drop(entry))
            self._tell(gone)
            return False
        self.counts["disk_hits"] += 1
        with contextlib.suppress(OSError):
            os.utime(path)  # its age survives a restart
        if self._config.memory_bytes:
            self._admit_to_memory(entry, buffer)
        return True

    def _forget_disk(self, entry: _Entry) -> None:
        if entry.is_on_disk:
            entry.is_on_disk = False
            self.disk_bytes -= entry.header.file_bytes
            self._disk.pop(entry.header.key, None)
            self._unlink(entry)

    def _unlink(self, entry: _Entry) -> None:
        # Under the lock: a new object of the same name is not written meanwhile.
        with contextlib.suppress(OSError):
            self._path(entry).unlink()

    def _path(self, entry: _Entry) -> Path:
        return records.path_of(self._folder, entry.header.key)

    def _restore(self) -> None:
        """Find what an earlier process left, as far as it is whole, fits and lives."""
        now_s = self._clock.now_s()
        for found in disk_index.scan(self._folder, self.counts):
            if found.age_s >= self._config.disk_ttl_s:
                found.path.unlink(missing_ok=True)
                continue
            entry = _Entry(found.header, now_s - found.age_s, is_on_disk=True)
            self._entries[found.header.key] = entry
            self._disk[found.header.key] = entry
            self.disk_bytes += found.header.file_bytes
        while self.disk_bytes > self._config.disk_bytes:
            self._drop(next(iter(self._disk.values())))
        self.counts["restored"] = len(self._entries)

    # entries; the caller holds the lock

    def _use(self, entry: _Entry) -> None:
        entry.used_s = self._clock.now_s()
        key = entry.header.key
        if entry.data is not None:
            self._memory.move_to_end(key)
        if entry.is_on_disk:
            self._disk.move_to_end(key)

    def _drop(self, entry: _Entry) -> _Entry:
        entry.is_dead = True
        self._forget_memory(entry)
        self._forget_disk(entry)
        if self._entries.get(entry.header.key) is entry:
            del self._entries[entry.header.key]
        return entry

    def _release(self, entry: _Entry) -> bool:
        """A copy is over; whether the object is there. Takes the lock itself."""
        with self._lock:
            entry.busy -= 1
            if not (entry.busy or entry.is_there or entry.is_dead):
                self._drop(entry)
            return entry.is_there

    def _tell(self, gone: Sequence[_Entry]) -> None:
        if gone:
            self._on_removed([(e.header.key, e.header.size) for e in gone])
