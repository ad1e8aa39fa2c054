"""Which objects there are, and the bytes of their files."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ttlcache_lmcache.store import object_file
from ttlcache_lmcache.store.object_file import Header, Mark


@dataclass(slots=True, eq=False)
class Entry:
    """One object. Visible once it is on disk.

    locks: lookups that promised it to a load.
    busy: copies under way; its file may not be given up meanwhile.
    is_doomed: deleted while it was copied; goes when that is over. Until then its
        key, and so its file's name, is nobody else's.
    is_dead: dropped.
    stamped_s: when its file was last given the time of a use.
    is_readable: it was when it was read last; what is not is written anew.
    mark: of the file as it was last written or verified; None while it is read, so
        that nobody else relies on pages which that read brings up.
    """

    header: Header
    used_s: float
    is_on_disk: bool = False
    locks: int = 0
    busy: int = 0
    is_doomed: bool = False
    is_dead: bool = False
    is_readable: bool = True
    stamped_s: float = float("-inf")
    mark: Mark | None = None

    @property
    def is_there(self) -> bool:
        return not self.is_doomed and self.is_on_disk

    @property
    def is_movable(self) -> bool:
        return not (self.locks or self.busy)


class Index:
    """Every object by key, and those on disk by last use. The caller locks.

    used_bytes: of files, at most `max_bytes`; counted before they are taken, by whoever
        reserves them.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder = folder
        self.entries: dict[bytes, Entry] = {}
        self.on_disk: OrderedDict[bytes, Entry] = OrderedDict()
        self.max_bytes = max_bytes
        self.used_bytes = 0

    def path(self, entry: Entry) -> Path:
        return object_file.path_of(self._folder, entry.header.key)

    def oldest(self) -> Entry | None:
        """The longest unused one that may be moved."""
        return next((each for each in self.on_disk.values() if each.is_movable), None)

    def older(self, used_before_s: float) -> list[Entry]:
        """Objects to give up for age."""
        found = []
        for entry in self.on_disk.values():
            if entry.used_s > used_before_s:
                break
            if entry.is_movable:
                found.append(entry)
        return found

    def use(self, entry: Entry, now_s: float) -> None:
        entry.used_s = now_s
        if entry.is_on_disk:
            self.on_disk.move_to_end(entry.header.key)

    def drop(self, entry: Entry) -> Entry:
        entry.is_dead = True
        if entry.is_on_disk:
            entry.is_on_disk = False
            self.used_bytes -= entry.header.file_bytes
            self.on_disk.pop(entry.header.key, None)
            # Under the lock: a new object of the same name is not written meanwhile.
            with contextlib.suppress(OSError):
                self.path(entry).unlink()
        if self.entries.get(entry.header.key) is entry:
            del self.entries[entry.header.key]
        return entry

    def restore(self, found: Iterable[Entry], used_before_s: float) -> None:
        """Take what an earlier process left, the longest unused first, as far as it
        lives and fits."""
        for entry in found:
            if entry.used_s <= used_before_s:
                self.path(entry).unlink(missing_ok=True)
                continue
            key = entry.header.key
            self.entries[key] = self.on_disk[key] = entry
            self.used_bytes += entry.header.file_bytes
        while self.used_bytes > self.max_bytes:
            self.drop(next(iter(self.on_disk.values())))
