"""One object, one file: what is in it, and how it is written and read.

    magic, lengths, digest | checksum of all that | key | meta | payload

A file says what it is: an index lost in a crash is read again from the headers. A
file appears under its name only when it is whole (rename), and the digest is compared
at every read: a truncated or altered file is a miss, never a wrong byte.

The digest is XXH3, 128 bits: it runs several times as fast as memory is copied, where
BLAKE2b took longer than the reading. It finds what disks, controllers and file systems
do to bytes (one damaged file in 2**128 goes unnoticed); it is not secret, and whoever
may write the files can write a digest that fits. So nobody else may: folders are 0700
and files 0600.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

import xxhash

#: The last byte is the format's version.
MAGIC = b"TTLKV\x00\x00\x02"
SUFFIX = ".kv"
FOLDER_MODE = 0o700
FILE_MODE = 0o600
#: Read and digested in pieces, so that the digest finds them in the core's cache.
PIECE_BYTES = 1 << 18
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
    def head_bytes(self) -> int:
        return _HEADER_BYTES + len(self.key) + len(self.meta)

    @property
    def file_bytes(self) -> int:
        return self.head_bytes + self.size


def digest_of(data: memoryview | bytes) -> bytes:
    """The interpreter's lock is not held meanwhile."""
    return xxhash.xxh3_128_digest(data)


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
    temporary = f"{path}.{next(_numbers)}{_TEMPORARY}"
    try:
        fd = _create(temporary)
        try:
            _write_all(fd, fields + check + text, memoryview(data).cast("B"))
        finally:
            os.close(fd)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _create(path: str) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        return os.open(path, flags, FILE_MODE)
    except FileNotFoundError:
        with contextlib.suppress(FileExistsError):  # another thread was here meanwhile
            os.mkdir(os.path.dirname(path), FOLDER_MODE)
        return os.open(path, flags, FILE_MODE)


def _write_all(fd: int, head: bytes, data: memoryview) -> None:
    done = os.writev(fd, [head, data]) - len(head)
    if done < 0:
        raise OSError(errno.EIO, "not even the header was written")
    while done < len(data):
        done += os.write(fd, data[done:])


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
    fd = os.open(path, os.O_RDONLY)
    try:
        if _parse_header(os.read(fd, expected.head_bytes)) != expected:
            raise CorruptRecordError("header")
        digest = xxhash.xxh3_128()
        done = 0
        while done < len(buffer):
            count = os.readv(fd, [buffer[done : done + PIECE_BYTES]])
            if not count:
                raise CorruptRecordError("truncated")
            digest.update(buffer[done : done + count])
            done += count
    finally:
        os.close(fd)
    if digest.digest() != expected.digest:
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
