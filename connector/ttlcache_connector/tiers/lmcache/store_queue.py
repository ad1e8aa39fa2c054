"""Which computed KV is stored when."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from lmcache.integration.vllm.lazy_offload_policy.base import (
    BlockHashes,
    DrainSignals,
    LazyOffloadDrain,
    OffloadPolicy,
    PendingStoreItem,
)
from lmcache.integration.vllm.lmcache_mp_metadata import LMCacheMPRequestMetadata
from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, get_block_hash

if TYPE_CHECKING:
    from ttlcache_connector.tiers.lmcache.stored_index import Below
    from ttlcache_connector.tiers.lmcache.suffix_index import LoneTails

#: From which token on something is due, and from which on it is not below yet: what
#: stands between may have been overwritten.
_Run = tuple[int, int]
#: An operation, and the hashes of its blocks.
_Op = tuple[LMCacheMPRequestMetadata, BlockHashes]

#: Copies ahead of expiry begin only while fewer turns than this are being copied.
AHEAD_IN_FLIGHT = 1


class DemotionQueue(OffloadPolicy):
    """Which computed KV is stored when: what `demote` says.

    LMCache offers every full chunk of every request as soon as it is computed. It
    stays here until the turn's pin expires, and is dropped when the next turn claims
    the pin: that turn offers the same chunks again, with its own.
    """

    def __init__(self, mode: str, chunk_tokens: int) -> None:
        self._mode = mode
        self._chunk_tokens = chunk_tokens
        self.tails: LoneTails | None = None  # told what goes down without its head
        self.below: Below | None = None  # asked what need not go down
        self._pending: dict[str, list[_Op]] = {}
        self._due: dict[str, list[_Run]] = {}  # in this order, tails first
        self._kept: dict[str, int] = {}  # tokens before a tail that went alone
        self._tailed: set[str] = set()  # of which the end is below
        self._ahead: dict[str, None] = {}
        self._broken: set[str] = set()
        self._emptied: list[str] = []
        # In the last drain: of which all that was due was emitted, and anything.
        self.emitted: list[str] = []
        self._submitted: list[str] = []

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
            self._due.setdefault(request_id, [(0, 0)])

    def drain(self, signals: DrainSignals) -> LazyOffloadDrain:
        drain = LazyOffloadDrain(emptied_request_ids=self._emptied)
        self._emptied = []
        self.emitted, self._submitted = [], []
        ready = [r for r in self._due if r not in signals.blocked_request_ids]
        if not ready and len(signals.blocked_request_ids) < AHEAD_IN_FLIGHT:
            ready = [r for r in self._ahead if r in self._pending][:1]
        for request_id in ready:
            start, begin = self._next_run(request_id)
            if request_id not in self._pending:
                continue
            chunks = self._take(request_id, start)
            if new := [chunk for chunk in chunks if chunk[0].op.end > begin]:
                drain.items.append(PendingStoreItem(request_id, new))
                self._submitted.append(request_id)
            if request_id not in self._due:
                self.emitted.append(request_id)
            if request_id not in self._pending:
                drain.emptied_request_ids.append(request_id)
        return drain

    def _next_run(self, request_id: str) -> _Run:
        """One a step: LMCache stores a request's chunks as one piece."""
        runs = self._due.pop(request_id, [(0, 0)])
        if runs[1:]:
            self._due[request_id] = runs[1:]
        return runs[0]

    def _take(self, request_id: str, start: int) -> list[_Op]:
        """The request's chunks from token `start` on; what precedes them stays.

        Chunk by chunk, because LMCache leaves out an operation of which a block was
        overwritten, and what follows; a prompt is one operation, and its tail goes
        first.
        """
        stay: list[_Op] = []
        taken: list[_Op] = []
        for op in self._pending.pop(request_id, []):
            if op[0].op.end <= start:
                stay.append(op)
                continue
            for chunk in self._chunks(*op):
                (stay if chunk[0].op.end <= start else taken).append(chunk)
        if stay:
            self._pending[request_id] = stay
            self._kept[request_id] = stay[-1][0].op.end
            self._tailed.add(request_id)
        else:
            self._due.pop(request_id, None)
            self._ahead.pop(request_id, None)
            self._kept.pop(request_id, None)
            self._tailed.discard(request_id)
        if self.tails is not None and taken:
            for chunk in taken if len(self.tails) else ():
                self.tails.discard(_last_hash(chunk))
            if stay:
                self.tails.add(_last_hash(stay[-1]))
        return taken

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
        self._tailed.discard(request_id)
        if self._kept.get(request_id):
            return 0  # what is left stands before what was lost
        self._broken.add(request_id)
        return self._drop(request_id)

    def log_final_stats(self) -> None:
        return

    # what we call

    def make_due(self, request_id: str, start: int = 0) -> int | None:
        """Store it in the next step; None if there is nothing to store.

        Args:
            start: only what holds this token and those after it.

        Returns:
            The first token of it that is not below yet, as far as one knows.
        """
        ops = self._pending.get(request_id)
        if not ops or ops[-1][0].op.end <= start:
            return None
        runs = self._due.get(request_id, [])
        if runs and runs[-1][0] <= start:
            return start
        begin = next(self._unknown(request_id, start), None)
        if runs:
            later_start, later_begin = runs[-1]
            if begin is None or begin >= later_start:
                runs[-1], begin = (start, later_begin), None
            elif later_start == later_begin:
                runs[-1] = (start, begin)
            else:
                runs.append((start, begin))
        elif begin is not None:
            self._due[request_id] = [(start, begin)]
        else:
            self._take(request_id, start)
            if request_id not in self._pending:
                self._emptied.append(request_id)
        return begin

    def count_unknown(self, request_id: str, start: int, end: int) -> int:
        """Tokens from `start` to `end`, where the turn's KV ends, that are not below.

        What is no whole chunk will never be.
        """
        ops = self._pending.get(request_id)
        if not ops:
            return 0
        loose = 0 if request_id in self._kept else max(0, end - ops[-1][0].op.end)
        chunks = sum(1 for _ in self._unknown(request_id, start))
        return self._chunk_tokens * chunks + loose

    def has_tail(self, request_id: str) -> bool:
        """Whether the end of what the request computed is below, and the rest not."""
        return request_id in self._tailed

    def check(self, stores: Collection[str]) -> None:
        """What LMCache made of the last drain: whose blocks it found unchanged."""
        self._tailed.difference_update(set(self._submitted).difference(stores))
        self._submitted = []

    def may_go_ahead(self, request_id: str) -> None:
        """Store it when nothing else is being stored."""
        if request_id in self._pending:
            self._ahead[request_id] = None

    def kept_tokens(self, request_id: str) -> int:
        """So many of the request's first tokens did not go down with its tail."""
        return self._kept.get(request_id, 0)

    def forget(self, request_id: str) -> None:
        if self._drop(request_id):
            self._emptied.append(request_id)

    @property
    def has_due(self) -> bool:
        """Whether another step would store something, or end a session."""
        return bool(self._due or self._ahead or self._emptied)

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

    def _unknown(self, request_id: str, start: int) -> Iterator[int]:
        """From token `start` on, where each chunk begins that has to be stored."""
        size = self._chunk_tokens
        for meta, hashes in self._pending.get(request_id, ()):
            op, ids = meta.op, meta.op.block_ids[0]
            per_chunk = len(ids) * size // (op.end - op.start)
            skipped = max(0, start - op.start) // size
            for number in range(skipped, (op.end - op.start) // size):
                last = (number + 1) * per_chunk - 1
                if self.below is None or not self._is_known(hashes[ids[last]]):
                    yield int(max(start, op.start + number * size))

    def _is_known(self, block_hash: BlockHashWithGroupId | None) -> bool:
        if self.below is None or block_hash is None:
            return False
        return bytes(get_block_hash(block_hash)) in self.below

    def _drop(self, request_id: str) -> int:
        self._due.pop(request_id, None)
        self._ahead.pop(request_id, None)
        self._kept.pop(request_id, None)
        self._tailed.discard(request_id)
        return len(self._pending.pop(request_id, ()))


def _last_hash(chunk: _Op) -> bytes:
    meta, hashes = chunk
    last = hashes[meta.op.block_ids[0][-1]]
    assert last is not None  # `add` takes no others
    return bytes(get_block_hash(last))
