"""The folder of a disk tier: who owns it, and what an earlier process left in it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from ttlcache.clock import wall_s
from ttlcache.errors import ConfigError
from ttlcache_lmcache.store import object_file
from ttlcache_lmcache.store.index import Entry
from ttlcache_lmcache.store.object_file import CorruptRecordError

_LOCK_NAME = ".ttlcache.lock"
_OUR_FILE = re.compile(r"[0-9a-f]{40}\.kv(?:\.\d+\.writing)?")
_OTHERS = stat.S_IRWXG | stat.S_IRWXO

#: Told the fault's name, what was wrong, and with which file.
OnFault = Callable[[str, Exception, Path], None]


def lock_folder(folder: Path) -> IO[bytes]:
    """Make the folder and keep other processes out until what is returned is closed.

    A folder that is there keeps its mode where it holds anything of others; what is
    below it is closed to them in any case.

    Raises:
        ConfigError: not a folder, not writable, or another process has it.
    """
    try:
        folder.mkdir(object_file.FOLDER_MODE, parents=True, exist_ok=True)
        if all(map(_is_ours, folder.iterdir())):
            _close_to_others(folder, object_file.FOLDER_MODE)
        flags = os.O_RDWR | os.O_CREAT
        fd = os.open(folder / _LOCK_NAME, flags, object_file.FILE_MODE)
    except OSError as error:
        raise ConfigError(
            f"key 'path' has value {str(folder)!r}, expected: a writable folder "
            f"({error})"
        ) from None
    lock = os.fdopen(fd, "rb")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise ConfigError(
            f"key 'path' has value {str(folder)!r}, expected: a folder that no other "
            "process uses; give every server its own"
        ) from None
    return lock


def _is_ours(path: Path) -> bool:
    return path.name == _LOCK_NAME or bool(re.fullmatch("[0-9a-f]{2}", path.name))


def _our_files(folder: Path) -> Iterator[Path]:
    """By their names. Links are not ours, nor is what they lead to."""
    for part in folder.iterdir():
        if _is_ours(part) and part.is_dir() and not part.is_symlink():
            _close_to_others(part, object_file.FOLDER_MODE)
            with contextlib.suppress(PermissionError):
                for path in part.iterdir():
                    if _OUR_FILE.fullmatch(path.name) and not path.is_symlink():
                        yield path


def _close_to_others(path: Path, mode: int) -> None:
    """What an earlier version, or whoever made the folder, left open."""
    if path.stat().st_mode & _OTHERS:
        with contextlib.suppress(PermissionError):  # somebody else's, as in a container
            path.chmod(mode)


def scan(folder: Path, now_s: float, on_fault: OnFault) -> list[Entry]:
    """All whole files, the longest unused first; damaged ones are counted and removed.

    Only headers and lengths are looked at; payloads are compared when they are read.
    """
    found: list[Entry] = []
    wall_now_s = wall_s()
    for path in _our_files(folder):
        try:
            if path.suffix == object_file.TEMPORARY:
                path.unlink()
                continue
            header = object_file.read_header(path)
            if object_file.path_of(folder, header.key) != path:
                raise CorruptRecordError("name")
            age_s = max(0.0, wall_now_s - path.stat().st_mtime)
            _close_to_others(path, object_file.FILE_MODE)
        except (OSError, CorruptRecordError) as error:
            fault = object_file.fault_of(error)
            on_fault(fault, error, path)
            if fault == "corrupt":
                with contextlib.suppress(OSError):
                    path.unlink()
            continue
        found.append(Entry(header, now_s - age_s, is_on_disk=True))
    return sorted(found, key=lambda entry: entry.used_s)
