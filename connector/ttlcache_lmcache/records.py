"""One object, one file: what is in it, and how it is written and read.

    magic, lengths, digest | checksum of all that | key | meta | payload

A file says what it is: an index lost in a crash is read again from the headers. A
file appears under its name only when it is whole (rename), and the digest is compared
at every read: a truncated or altered file is a miss, never a wrong byte.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

MAGIC = b"TTLKV\x00\x00\x01"
SUFFIX = ".kv"
_TEMPORARY = ".writing"
_DIGEST_BYTES = 16
_FIELDS = struct.Struct(f"<8sIIQ{_DIGEST_BYTES}s")
_CHECK = struct.Struct("<I")
_HEADER_BYTES = _FIELDS.size + _CHECK.size
#: Keys and meta are short; anything longer is no header of ours.
_MAX_TEXT = 1 << 16
_numbers = itertools.count()


class CorruptRecordError(Exception):
    """The file is not, or no longer, what was written."""


@dataclass(frozen=True, slots=True)
class Header:
    """What a file says about its object; `size` is the payload's bytes."""

    key: bytes
    meta: bytes
    size: int
    digest: bytes

    @property
    def file_bytes(self) -> int:
        return _HEADER_BYTES + len(self.key) + len(self.meta) + self.size


def digest_of(data: memoryview | bytes) -> bytes:
    """128 bits of BLAKE2b; the interpreter's lock is not held meanwhile."""
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()


def path_of(folder: Path, key: bytes) -> Path:
    name = hashlib.blake2b(key, digest_size=20).hexdigest()
    return folder / name[:2] / (name + SUFFIX)


def write(path: Path, header: Header, data: memoryview | bytes) -> None:
    """Write a file whole or not at all.

    Raises:
        OSError: disk full, folder gone; nothing of it stays behind.
    """
    fields = _FIELDS.pack(
        MAGIC, len(header.key), len(header.meta), header.size, header.digest
    )
    text = header.key + header.meta
    check = _CHECK.pack(zlib.crc32(text, zlib.crc32(fields)))
    temporary = path.with_name(f"{path.name}.{next(_numbers)}{_TEMPORARY}")
    try:
        path.parent.mkdir(exist_ok=True)
        with temporary.open("wb", buffering=0) as file:
            _write_all(file.fileno(), fields + check + text)
            _write_all(file.fileno(), data)
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def _write_all(fd: int, data: memoryview | bytes) -> None:
    left = memoryview(data).cast("B")
    while left:
        left = left[os.write(fd, left) :]


def read_header(path: Path) -> Header:
    """The header of a file as long as it should be.

    Raises:
        CorruptRecordError: it is not ours, damaged, or of another length.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        header = _parse_header(file.read(_HEADER_BYTES + _MAX_TEXT))
    if path.stat().st_size != header.file_bytes:
        raise CorruptRecordError("length")
    return header


def read_into(path: Path, expected: Header, buffer: memoryview) -> None:
    """Read the payload into `buffer`, which has exactly its size.

    Raises:
        CorruptRecordError: it is not what was written; `buffer` holds garbage.
        OSError: it cannot be read.
    """
    head_bytes = expected.file_bytes - expected.size
    with path.open("rb", buffering=0) as file:
        if _parse_header(file.read(head_bytes)) != expected:
            raise CorruptRecordError("header")
        left = buffer
        while left:
            count = file.readinto(left)
            if not count:
                raise CorruptRecordError("truncated")
            left = left[count:]
    if digest_of(buffer) != expected.digest:
        raise CorruptRecordError("digest")


def _parse_header(raw: bytes) -> Header:
    if len(raw) < _HEADER_BYTES:
        raise CorruptRecordError("truncated header")
    magic, key_length, meta_length, size, digest = _FIELDS.unpack_from(raw)
    if magic != MAGIC or key_length + meta_length > _MAX_TEXT:
        raise CorruptRecordError("magic")
    (check,) = _CHECK.unpack_from(raw, _FIELDS.size)
    text = raw[_HEADER_BYTES : _HEADER_BYTES + key_length + meta_length]
    if zlib.crc32(text, zlib.crc32(raw[: _FIELDS.size])) != check:
        raise CorruptRecordError("header checksum")
    return Header(text[:key_length], text[key_length:], size, digest)


def is_temporary(path: Path) -> bool:
    return path.name.endswith(_TEMPORARY)
