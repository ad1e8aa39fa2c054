"""The folder of a disk tier: who owns it, and what an earlier process left in it."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from ttlcache.clock import wall_s
from ttlcache.errors import ConfigError
from ttlcache_lmcache import records
from ttlcache_lmcache.records import CorruptRecordError, Header

_LOCK_NAME = ".ttlcache.lock"


@dataclass(frozen=True, slots=True)
class Found:
    """A whole file; `age_s` since its last use."""

    path: Path
    header: Header
    age_s: float


def lock_folder(folder: Path) -> int:
    """Make the folder and keep other processes out; the lock's file descriptor.

    Raises:
        ConfigError: not a folder, not writable, or another process has it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        fd = os.open(folder / _LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise ConfigError(
            f"key 'path' has value {str(folder)!r}, expected: a writable folder "
            f"({error})"
        ) from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise ConfigError(
            f"key 'path' has value {str(folder)!r}, expected: a folder that no other "
            "process uses; give every server and every worker its own"
        ) from None
    return fd


def unlock_folder(fd: int) -> None:
    with contextlib.suppress(OSError):
        os.close(fd)


def scan(folder: Path, counts: Counter[str]) -> list[Found]:
    """All whole files, the longest unused first; others are removed.

    Only headers and lengths are looked at; payloads are compared when they are read.
    """
    found: list[Found] = []
    now_s = wall_s()
    for path in folder.glob("??/*"):
        if records.is_temporary(path):
            path.unlink(missing_ok=True)
            continue
        if path.suffix != records.SUFFIX:
            continue  # not ours
        try:
            header = records.read_header(path)
            if records.path_of(folder, header.key) != path:
                raise CorruptRecordError("name")
            age_s = max(0.0, now_s - path.stat().st_mtime)
        except (OSError, CorruptRecordError):
            counts["corrupt"] += 1
            with contextlib.suppress(OSError):
                path.unlink()
            continue
        found.append(Found(path, header, age_s))
    found.sort(key=lambda each: -each.age_s)
    return found
