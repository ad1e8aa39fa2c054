"""LMCache's object keys as the names of our objects, and lists of them."""

from __future__ import annotations

from collections.abc import Iterable

from lmcache.v1.distributed.api import (
    EncodedObjectKey,
    KeyEntry,
    KeyListPage,
    ObjectKey,
)

from ttlcache_lmcache.store.object_file import Header

_SEPARATOR = "@"  # LMCache keeps it out of model names and salts


def encode_key(key: ObjectKey) -> bytes:
    parts = (
        key.chunk_hash.hex(),
        f"{key.kv_rank:x}",
        str(key.object_group_id),
        key.cache_salt,
        key.model_name,
    )
    return _SEPARATOR.join(parts).encode()


def decode_key(raw: bytes) -> ObjectKey:
    chunk_hash, rank, group, salt, model = raw.decode().split(_SEPARATOR)
    return ObjectKey(
        chunk_hash=bytes.fromhex(chunk_hash),
        model_name=model,
        kv_rank=int(rank, 16),
        object_group_id=int(group),
        cache_salt=salt,
    )


def page_of_keys(
    headers: Iterable[Header],
    model_name: str | None,
    page_size: int,
    cursor: str | None,
) -> KeyListPage:
    """Keys in order; the cursor is the last one given out.

    Raises:
        ValueError: a page of no keys, or a cursor that nobody gave out.
    """
    if page_size <= 0:
        raise ValueError(f"page_size {page_size}: expected a positive number")
    try:
        after = bytes.fromhex(cursor) if cursor is not None else b""
    except ValueError:
        raise ValueError(f"cursor {cursor!r} is malformed") from None
    in_order = sorted(headers, key=lambda header: header.key)
    rest = [header for header in in_order if header.key > after]
    if model_name is not None:
        rest = [h for h in rest if decode_key(h.key).model_name == model_name]
    page = rest[:page_size]
    entries = tuple(
        KeyEntry(_encoded(decode_key(header.key)), header.size) for header in page
    )
    more = len(rest) > page_size
    return KeyListPage(entries, page[-1].key.hex() if more else None)


def _encoded(key: ObjectKey) -> EncodedObjectKey:
    encoded: EncodedObjectKey = key.to_encoded_object_key()
    return encoded
