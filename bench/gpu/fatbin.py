"""Cuts the CUDA code in a shared library to one GPU architecture.

A library's section `.nv_fatbin` holds containers; each has entries, device code for
one architecture or PTX. Entries of others are dropped and the rest is zeroed: no
offset outside a container changes, so the library loads as before, and the zeros
compress to nothing. A container without the architecture keeps the library's smallest
entry, so that the driver finds valid code that is "for no device here", as before.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

_MAGIC = 0xBA55ED50
#: magic, version, header bytes, payload bytes.
_CONTAINER = struct.Struct("<IHHQ")
#: kind, version, header bytes, payload bytes; the architecture is at byte 28.
_ENTRY = struct.Struct("<HHIQ")
_ARCH = struct.Struct("<I")
_ARCH_AT = 28
_PTX, _CUBIN = 1, 2


@dataclass(frozen=True, slots=True)
class _Entry:
    kind: int
    arch: int
    code: bytes


def cut(library: bytes, arch: int) -> bytes:
    """The library, of the same size, with device code of `arch` only (90 for sm_90).

    Raises:
        ValueError: a section that is not built as expected.
    """
    start, size = _section(library, ".nv_fatbin")
    if not size:
        return library
    found = list(_containers(library, start, start + size))
    others = (e for _, entries in found for e in entries if e.kind == _CUBIN)
    smallest = min((e.code for e in others), key=len, default=b"")
    result = bytearray(library)
    for at, entries in found:
        _, _, header, payload = _CONTAINER.unpack_from(library, at)
        kept = [e.code for e in entries if (e.kind, e.arch) == (_CUBIN, arch)]
        body = b"".join(kept) or smallest
        if not body or len(body) > payload:
            raise ValueError(f"no code to keep in the container at {at:#x}")
        begin = at + header
        result[begin : begin + payload] = body.ljust(payload, b"\0")
        _CONTAINER.pack_into(result, at, _MAGIC, 1, header, len(body))
    return bytes(result)


def _section(library: bytes, wanted: str) -> tuple[int, int]:
    """Offset and bytes of an ELF section; no bytes where there is none."""
    if library[:6] != b"\x7fELF\x02\x01":
        raise ValueError("not a 64-bit little-endian ELF file")
    (table,) = struct.unpack_from("<Q", library, 0x28)
    entry_bytes, count, names = struct.unpack_from("<HHH", library, 0x3A)

    def header(index: int) -> tuple[int, int, int]:
        at = table + index * entry_bytes
        (name,) = struct.unpack_from("<I", library, at)
        offset, size = struct.unpack_from("<QQ", library, at + 24)
        return name, offset, size

    _, texts, _ = header(names)
    for index in range(count):
        name, offset, size = header(index)
        end = library.index(b"\0", texts + name)
        if library[texts + name : end].decode() == wanted:
            return offset, size
    return 0, 0


def _containers(
    library: bytes, at: int, end: int
) -> Iterator[tuple[int, list[_Entry]]]:
    """Where each begins, and its entries; zeros may lie between."""
    while at + _CONTAINER.size <= end:
        magic, version, header, payload = _CONTAINER.unpack_from(library, at)
        if not magic:
            at += 8
            continue
        last = at + header + payload
        if magic != _MAGIC or version != 1 or last > end:
            raise ValueError(f"no container at {at:#x}")
        yield at, list(_entries(library, at + header, last))
        at = last


def _entries(library: bytes, at: int, end: int) -> Iterator[_Entry]:
    while at < end:
        kind, _, header, payload = _ENTRY.unpack_from(library, at)
        (arch,) = _ARCH.unpack_from(library, at + _ARCH_AT)
        last = at + header + payload
        if kind not in (_PTX, _CUBIN) or last > end:
            raise ValueError(f"no entry at {at:#x}")
        yield _Entry(kind, arch, library[at:last])
        at = last
    if at != end:
        raise ValueError(f"an entry that ends at {at:#x} behind its container")
