"""Which computed KV is stored when."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from lmcache.integration.vllm.lazy_offload_policy.base import (
    BlockHashes,
    DrainSignals,
    LazyOffloadDrain,
    OffloadPolicy,
    PendingStoreItem,
)
from lmcache.integration.vllm.lmcache_mp_metadata import LMCacheMPRequestMetadata

#: An operation, and the hashes of its blocks.
_Op = tuple[LMCacheMPRequestMetadata, BlockHashes]


class StoreQueue(OffloadPolicy):
    """Which computed KV is stored when, as configured by `demote`.

    LMCache offers every full chunk of every request as soon as it is computed. But for
    `write-through` it stays here until the turn is demoted (`make_due`), and is dropped
    when the next turn claims the pin: that one offers the same chunks again.
    """

    def __init__(self, mode: str, chunk_tokens: int) -> None:
        """
        Args:
            mode: `demote`.
        """
        self._mode = mode
        self._chunk_tokens = chunk_tokens
        self._pending: dict[str, list[_Op]] = {}
        self._due: dict[str, None] = {}  # in this order
        self._broken: set[str] = set()
        self._emptied: list[str] = []
        self._releasable: list[str] = []  # handed to LMCache since `take_releasable`

    # what LMCache calls

    def add(self, meta: LMCacheMPRequestMetadata, block_hashes: BlockHashes) -> None:
        request_id = meta.request_id
        if request_id in self._broken:
            return
        if any(block_hash is None for block_hash in block_hashes.values()):
            self._broken.add(request_id)  # a gap would make the rest unreachable
            return
        self._pending.setdefault(request_id, []).append((meta, block_hashes))
        if self._mode == "write-through":
            self._due[request_id] = None

    def drain(self, signals: DrainSignals) -> LazyOffloadDrain:
        """What LMCache is to store in this step.

        Chunk by chunk, because LMCache leaves out an operation of which a block was
        overwritten, and what follows; a prompt is one operation.
        """
        drain = LazyOffloadDrain(emptied_request_ids=self._emptied)
        self._emptied = []
        ready = [r for r in self._due if r not in signals.blocked_request_ids]
        for request_id in ready:
            del self._due[request_id]
            ops = self._pending.pop(request_id)
            chunks = [chunk for op in ops for chunk in self._chunks(*op)]
            drain.items.append(PendingStoreItem(request_id, chunks))
            self._releasable.append(request_id)
            drain.emptied_request_ids.append(request_id)
        return drain

    def has_pending_request(self, request_id: str) -> bool:
        return request_id in self._pending

    def drop_request(self, request_id: str) -> int:
        self._broken.discard(request_id)
        return self._drop(request_id)

    def discard_for_reuse(self, request_id: str) -> None:
        self.drop_request(request_id)

    def release_request(self, request_id: str) -> None:
        self._broken.discard(request_id)

    def mark_store_failed(self, request_id: str) -> int:
        self._broken.add(request_id)
        return self._drop(request_id)

    def log_final_stats(self) -> None:
        return

    # what we call

    def make_due(self, request_id: str) -> bool:
        """Store it in the next step; False if there is nothing to store."""
        if request_id not in self._pending:
            return False
        self._due.setdefault(request_id)
        return True

    def take_releasable(self) -> list[str]:
        """As `TierEvents.releasable`, since the last call."""
        releasable, self._releasable = self._releasable, []
        return releasable

    def drop(self, request_id: str) -> None:
        """As `TierDemotions.drop`."""
        if self._drop(request_id):
            self._emptied.append(request_id)

    @property
    def has_due(self) -> bool:
        """Whether another step would store something, or end a session."""
        return bool(self._due or self._emptied)

    def _chunks(
        self, meta: LMCacheMPRequestMetadata, hashes: BlockHashes
    ) -> Iterator[_Op]:
        """The operation chunk by chunk; LMCache puts it together again."""
        op, size = meta.op, self._chunk_tokens
        count = (op.end - op.start) // size
        for number in range(count):
            ids = [
                group[number * len(group) // count : (number + 1) * len(group) // count]
                for group in op.block_ids
            ]
            start = op.start + number * size
            part = replace(op, block_ids=ids, start=start, end=start + size)
            own = {i: hashes[i] for group in ids for i in group}
            yield replace(meta, op=part), own

    def _drop(self, request_id: str) -> int:
        self._due.pop(request_id, None)
        return len(self._pending.pop(request_id, ()))
