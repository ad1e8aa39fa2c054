"""Which objects are in L1, by chunk. Not thread-safe.

An object is one worker's (and one layer group's) part of a chunk. LMCache's keys are
used as they are: hashable, with `model_name`, `cache_salt` and `chunk_hash`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Protocol

from ttlcache_lmcache.retention.program_table import Chunk, Watcher


class ObjectKey(Protocol):
    """What we read of LMCache's `ObjectKey`."""

    @property
    def chunk_hash(self) -> bytes: ...

    @property
    def model_name(self) -> str: ...

    @property
    def cache_salt(self) -> str: ...


def space_of(model: str, salt: str) -> str:
    """Within one space a chunk hash means the same KV: one model's, under one salt.

    Interned: LMCache decodes both names anew for every request, and chunks keep them.
    """
    # LMCache allows no "@" in either.
    return sys.intern(f"{model}@{salt}" if salt else model)


def chunk_of(key: ObjectKey) -> Chunk:
    return (space_of(key.model_name, key.cache_salt), key.chunk_hash)


class Residency:
    """Objects in L1, by chunk and with the time of the chunk's last use."""

    def __init__(self, watcher: Watcher) -> None:
        self._l1: dict[Chunk, dict[ObjectKey, None]] = {}
        self._used_s: dict[Chunk, float] = {}
        self._reserved: dict[ObjectKey, None] = {}
        self._num_l1 = 0
        self._watcher = watcher

    @property
    def num_l1(self) -> int:
        """Objects in L1, those being written included."""
        return self._num_l1 + len(self._reserved)

    def reserve(self, keys: Iterable[ObjectKey]) -> None:
        """Space was reserved; a writer that dies leaves it to eviction."""
        for key in keys:
            if key not in self._l1.get(chunk_of(key), ()):
                self._reserved[key] = None

    def write(self, keys: Iterable[ObjectKey], now_s: float) -> None:
        for key in keys:
            self._reserved.pop(key, None)
            chunk = chunk_of(key)
            objects = self._l1.get(chunk)
            if objects is None:
                objects = self._l1[chunk] = {}
                self._used_s[chunk] = now_s
                self._watcher.entered(chunk, now_s)
            else:
                self.touch(chunk, now_s)
            if key not in objects:
                objects[key] = None
                self._num_l1 += 1

    def touch(self, chunk: Chunk, now_s: float) -> None:
        if chunk in self._used_s:
            self._used_s[chunk] = now_s
            self._watcher.used(chunk, now_s)

    def used_s(self, chunk: Chunk) -> float | None:
        """When the chunk was used last; None if L1 has nothing of it."""
        return self._used_s.get(chunk)

    def delete(self, keys: Iterable[ObjectKey]) -> None:
        for key in keys:
            self._reserved.pop(key, None)
            chunk = chunk_of(key)
            objects = self._l1.get(chunk)
            if objects is None or key not in objects:
                continue
            del objects[key]
            self._num_l1 -= 1
            if not objects:
                del self._l1[chunk]
                del self._used_s[chunk]
                self._watcher.left(chunk)

    def has(self, chunk: Chunk) -> bool:
        """Whether L1 has something of the chunk."""
        return chunk in self._l1

    def has_object(self, key: ObjectKey) -> bool:
        """Whether L1 has it, or somebody is writing it."""
        return key in self._reserved or key in self._l1.get(chunk_of(key), ())

    def objects(self, chunk: Chunk) -> list[ObjectKey]:
        """The chunk's objects in L1."""
        return list(self._l1.get(chunk, ()))

    def reserved(self) -> list[ObjectKey]:
        return list(self._reserved)
