"""One object, one file: what is in it, and how it is written and read.

    payload | key | magic, lengths, digest | checksum of all but the payload

The payload is first: pages are copied faster where their bounds are the
buffer's. A file says what it is: an index lost in a crash is read again. A file
appears under its name only when it is whole (rename), and the digest of what comes
from the disk is compared: a truncated or altered file is a miss, never a wrong byte.

The digest is XXH3, 128 bits: it runs several times as fast as memory is copied, where
BLAKE2b took longer than the reading. It finds what disks, controllers and file systems
do to bytes (one damaged file in 2**128 goes unnoticed); it is not secret, and whoever
may write the files can write a digest that fits. So nobody else may: folders are 0700
and files 0600.
"""

from __future__ import annotations

import contextlib
import ctypes
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
MAGIC = b"TTLKV\x00\x00\x04"
SUFFIX = ".kv"
TEMPORARY = ".writing"
FOLDER_MODE = 0o700
FILE_MODE = 0o600
#: Copied and digested in pieces, so that the second of both finds them in a cache;
#: smaller ones cost more in threads that wait for the interpreter than they gain.
PIECE_BYTES = 1 << 20
_DIGEST_BYTES = 16
_FIELDS = struct.Struct(f"<8sIQ{_DIGEST_BYTES}s")
_CHECK = struct.Struct("<I")
_TAIL_BYTES = _FIELDS.size + _CHECK.size
#: Keys are short; anything longer is none of ours.
_MAX_KEY = 1 << 12
_numbers = itertools.count()
#: Since Linux 6.5: how many pages of a range of a file are in the page cache.
_CACHESTAT = 451
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_libc = ctypes.CDLL(None)


#: Inode, time of its last change, bytes: other ones, and the file was written to.
Mark = tuple[int, int, int]


class CorruptRecordError(Exception):
    """The file is not, or no longer, what was written."""


def fault_of(error: Exception) -> str:
    """What `error` says of a file: the key in `store.FAULTS`."""
    is_bad = isinstance(error, OSError) and error.errno == errno.EIO
    if is_bad or isinstance(error, CorruptRecordError):
        return "corrupt"
    return "missing" if isinstance(error, FileNotFoundError) else "read_errors"


@dataclass(frozen=True, slots=True)
class Header:
    """What a file says about its object; `size` is the payload's bytes."""

    key: bytes
    size: int
    digest: bytes

    @property
    def file_bytes(self) -> int:
        return self.size + len(self.key) + _TAIL_BYTES

    def encode(self) -> bytes:
        """What follows the payload."""
        fields = _FIELDS.pack(MAGIC, len(self.key), self.size, self.digest)
        text = self.key + fields
        return text + _CHECK.pack(zlib.crc32(text))


def path_of(folder: Path, key: bytes) -> Path:
    name = hashlib.blake2b(key, digest_size=20).hexdigest()
    return Path(f"{folder}/{name[:2]}/{name}{SUFFIX}")


def mark_of(file: int | Path) -> Mark:
    found = os.stat(file)
    return found.st_ino, found.st_ctime_ns, found.st_size


def write(path: Path, key: bytes, data: memoryview) -> tuple[Header, Mark]:
    """Write a file whole or not at all.

    Raises:
        OSError: disk full, folder gone; nothing of it stays behind.
    """
    temporary = f"{path}.{next(_numbers)}{TEMPORARY}"
    try:
        fd = _create(temporary)
        try:
            header = Header(key, len(data), _write_digested(fd, data))
            _write_all(fd, memoryview(header.encode()))
            os.replace(temporary, path)
            return header, mark_of(fd)
        finally:
            os.close(fd)
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


def _write_digested(fd: int, data: memoryview) -> bytes:
    digest = xxhash.xxh3_128()
    for start in range(0, len(data), PIECE_BYTES):
        piece = data[start : start + PIECE_BYTES]
        digest.update(piece)
        _write_all(fd, piece)
    return digest.digest()


def _write_all(fd: int, data: memoryview) -> None:
    while data:
        data = data[os.write(fd, data) :]


def read_header(path: Path) -> Header:
    """The header of a file as long as it should be.

    Raises:
        CorruptRecordError: it is not ours, damaged, or of another length.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        length = os.fstat(file.fileno()).st_size
        file.seek(max(0, length - _TAIL_BYTES - _MAX_KEY))
        header = _parse(file.read())
    if length != header.file_bytes:
        raise CorruptRecordError("length")
    return header


def read_into(
    path: Path, expected: Header, buffer: memoryview, mark: Mark | None = None
) -> Mark:
    """Read the payload into `buffer`, which has exactly its size.

    Args:
        mark: of the file as this process wrote or verified it. Where it still fits,
            and all pages are in the page cache, those are the bytes: no digest. (If
            they left it, and another process read them in again, nobody compared.)

    Returns:
        The file's mark.

    Raises:
        CorruptRecordError: it is not what was written; `buffer` holds garbage.
        OSError: it cannot be read.
    """
    fd = os.open(path, os.O_RDONLY)
    try:
        found = mark_of(fd)
        if mark == found and _read_cached(fd, buffer):
            return found
        digest = xxhash.xxh3_128()
        done = 0
        while done < len(buffer):
            count = os.readv(fd, [buffer[done : done + PIECE_BYTES]])
            if not count:
                raise CorruptRecordError("truncated")
            digest.update(buffer[done : done + count])
            done += count
        tail = expected.encode()
        if os.read(fd, len(tail)) != tail:
            raise CorruptRecordError("header")
    finally:
        os.close(fd)
    if digest.digest() != expected.digest:
        raise CorruptRecordError("digest")
    return found


def _read_cached(fd: int, buffer: memoryview) -> bool:
    """False: not all of it is in the page cache, or there is no telling.

    `RWF_NOWAIT` alone waits for no page but may take one that is just being read.
    """
    bounds, found = (ctypes.c_uint64 * 2)(0, len(buffer)), (ctypes.c_uint64 * 5)()
    failed = _libc.syscall(_CACHESTAT, fd, bounds, found, 0)
    if failed or found[0] < -(-len(buffer) // _PAGE_BYTES):
        return False
    try:
        return os.preadv(fd, [buffer], 0, os.RWF_NOWAIT) == len(buffer)
    except OSError:
        return False


def _parse(raw: bytes) -> Header:
    """The header at the end of `raw`."""
    if len(raw) < _TAIL_BYTES:
        raise CorruptRecordError("truncated header")
    before, tail = raw[:-_TAIL_BYTES], raw[-_TAIL_BYTES:]
    magic, key_length, size, digest = _FIELDS.unpack_from(tail)
    if magic != MAGIC or key_length > len(before):
        raise CorruptRecordError("magic")
    header = Header(before[len(before) - key_length :], size, digest)
    if header.encode() != header.key + tail:
        raise CorruptRecordError("header checksum")
    return header
