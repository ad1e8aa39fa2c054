"""What is believed stored in LMCache, so that no copy of it is waited for."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lmcache.integration.vllm.lmcache_mp_metadata import LMCacheMPRequestMetadata
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import get_block_hash

#: Share of the server's CPU memory that is trusted to hold what was last stored or
#: found: another engine may use it as much as this one.
TRUSTED_SHARE = 0.5


class StoredIndex:
    """Stored chunks by the hash of their last block, which names all that precedes it.

    The server evicts without a notice, least recently used first (or, with the
    retention module, by program). This index forgets sooner. Where it is wrong, as
    where a store found no room, a turn whose blocks were freed is prefilled.
    """

    def __init__(self, chunk_tokens: int, block_tokens: int, chunk_bytes: int) -> None:
        """
        Args:
            chunk_tokens: of one stored chunk.
            block_tokens: of one block hash.
            chunk_bytes: of one stored chunk.
        """
        self._chunk_tokens = chunk_tokens
        self._step = chunk_tokens // block_tokens
        self._chunk_bytes = chunk_bytes
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._most = 0
        self._copies: dict[str, list[bytes]] = {}
        self._older: frozenset[str] = frozenset()  # requests of before a reset

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._known

    def __len__(self) -> int:
        return len(self._known)

    def trust(self, cpu_bytes: float) -> None:
        """The server has that much CPU memory; 0: it does not say."""
        self._most = int(cpu_bytes * TRUSTED_SHARE / self._chunk_bytes)
        self._shorten()

    def found(self, block_hashes: Sequence[bytes], begin: int, end: int) -> None:
        """A lookup from token `begin` on found what stands before token `end`.

        Args:
            block_hashes: of all that was looked for.
        """
        ends = range(self._step - 1, len(block_hashes), self._step)
        first, last = begin // self._chunk_tokens, end // self._chunk_tokens
        self._add(block_hashes[i] for i in ends[first:last])
        for i in ends[max(first, last) :]:
            self._known.pop(block_hashes[i], None)

    def on_copies_start(
        self, stores: Mapping[str, LMCacheMPRequestMetadata], pool: BlockPool
    ) -> None:
        """The stores that workers begin in this step."""
        for request_id, order in stores.items():
            if request_id in self._older:
                continue
            ids = order.op.block_ids[0]
            count = (order.op.end - order.op.start) // self._chunk_tokens
            last = [ids[(n + 1) * len(ids) // count - 1] for n in range(count)]
            hashes = (pool.blocks[i].block_hash for i in last)
            self._copies[request_id] = [
                bytes(get_block_hash(h)) for h in hashes if h is not None
            ]

    def on_copy_end(self, request_id: str, *, is_lost: bool) -> None:
        """On all ranks; is_lost: on one of them it failed."""
        hashes = self._copies.pop(request_id, [])
        if not is_lost:
            self._add(hashes)

    def clear(self) -> None:
        """It is gone."""
        self._known.clear()
        self._copies.clear()

    def reset(self, request_ids: Iterable[str]) -> None:
        """It is worthless, and so is all that these requests store from now on."""
        self.clear()
        self._older = frozenset(request_ids)

    def _add(self, hashes: Iterable[bytes]) -> None:
        for block_hash in hashes:
            self._known[block_hash] = None
            self._known.move_to_end(block_hash)
        self._shorten()

    def _shorten(self) -> None:
        while len(self._known) > self._most:
            self._known.popitem(last=False)


def chunk_bytes(kv_cache_config: Any, chunk_tokens: int, ranks: int) -> int:
    """KV bytes of one chunk on all ranks, of a model with one KV cache group."""
    (group,) = kv_cache_config.kv_cache_groups
    spec = group.kv_cache_spec
    # A spec of unlike layers gives the sum over them.
    layers = 1 if hasattr(spec, "kv_cache_specs") else len(group.layer_names)
    return int(chunk_tokens // spec.block_size * spec.page_size_bytes * layers * ranks)
