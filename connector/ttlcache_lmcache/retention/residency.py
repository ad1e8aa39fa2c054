"""Which objects are in L1, by chunk, and the last use of those that no program has.

An object is one worker's (and one layer group's) part of a chunk. LMCache's keys are
used as they are: hashable, with `model_name`, `cache_salt` and `chunk_hash`.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from sortedcontainers import SortedDict

#: (space, chunk hash), see `space_of`. The hash alone would mix models, and what
#: clients and resets keep apart by a salt.
Chunk: TypeAlias = tuple[str, bytes]


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


def chain_of(model: str, salt: str, hashes: Iterable[bytes]) -> list[Chunk]:
    """A context's chunks, from the start."""
    space = space_of(model, salt)
    return [(space, bytes(each)) for each in hashes]


@dataclass(slots=True)
class _Resident:
    """A chunk of which L1 has something.

    used: when it was used last, and what settles ties.
    """

    used: tuple[float, int] = (-math.inf, 0)
    objects: dict[ObjectKey, None] = field(default_factory=dict)


class Residency:
    """Objects in L1. Not thread-safe."""

    def __init__(self) -> None:
        self._chunks: dict[Chunk, _Resident] = {}
        self._reserved: dict[ObjectKey, None] = {}
        self._num_written = 0
        self._unowned: SortedDict[tuple[float, int], Chunk] = SortedDict()
        # Contexts are used from their start on: of one moment the tail goes first.
        self._numbers = itertools.count(0, -1)

    @property
    def num_objects(self) -> int:
        """Objects in L1, those being written included."""
        return self._num_written + len(self._reserved)

    def reserve(self, keys: Iterable[ObjectKey]) -> None:
        """Space was reserved; a writer that dies leaves it to eviction."""
        for key in keys:
            if not self.has_object(key):
                self._reserved[key] = None

    def write(self, keys: Iterable[ObjectKey], now_s: float) -> list[Chunk]:
        """Objects are there; the chunks of which L1 had nothing."""
        new = []
        for key in keys:
            self._reserved.pop(key, None)
            chunk = chunk_of(key)
            if chunk not in self._chunks:
                self._chunks[chunk] = _Resident()
                new.append(chunk)
            self.touch(chunk, now_s)
            objects = self._chunks[chunk].objects
            self._num_written += key not in objects
            objects[key] = None
        return new

    def touch(self, chunk: Chunk, now_s: float) -> None:
        found = self._chunks.get(chunk)
        if found is not None:
            is_nobodys = self._unowned.pop(found.used, None) is not None
            found.used = (now_s, next(self._numbers))
            if is_nobodys:
                self._unowned[found.used] = chunk

    def delete(self, keys: Iterable[ObjectKey]) -> None:
        for key in keys:
            self._reserved.pop(key, None)
            chunk = chunk_of(key)
            found = self._chunks.get(chunk)
            if found is None or key not in found.objects:
                continue
            del found.objects[key]
            self._num_written -= 1
            if not found.objects:
                self.own(chunk)
                del self._chunks[chunk]

    def has(self, chunk: Chunk) -> bool:
        """Whether L1 has something of the chunk."""
        return chunk in self._chunks

    def has_object(self, key: ObjectKey) -> bool:
        """Whether L1 has it, or somebody is writing it."""
        return key in self._reserved or key in self.objects(chunk_of(key))

    def objects(self, chunk: Chunk) -> dict[ObjectKey, None]:
        """The chunk's objects in L1."""
        found = self._chunks.get(chunk)
        return found.objects if found is not None else {}

    def reserved(self) -> list[ObjectKey]:
        return list(self._reserved)

    # what no program has

    def disown(self, chunk: Chunk) -> None:
        """No program has the chunk, or none any more."""
        found = self._chunks.get(chunk)
        if found is not None:
            self._unowned[found.used] = chunk

    def own(self, chunk: Chunk) -> None:
        """A program has the chunk."""
        found = self._chunks.get(chunk)
        if found is not None:
            self._unowned.pop(found.used, None)

    def unowned(self) -> Iterator[tuple[float, Chunk]]:
        """The time of its last use, and the chunk, by that time."""
        return ((used_s, chunk) for (used_s, _), chunk in self._unowned.items())
