"""Bytes between vLLM's KV tensors and LMCache's memory, on a thread of ours."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from lmcache.v1.multiprocess.futures import MessagingFuture
from lmcache.v1.multiprocess.transfer_context.base import (
    gather_paged_kv_to_cpu,
    scatter_cpu_to_paged_kv,
)
from lmcache.v1.multiprocess.transfer_context.worker_transfer import (
    EngineDrivenTransferContext,
)

from ttlcache.metrics import MetricsBuffer
from ttlcache_connector.movethread import Move, MoveThread


class LMCacheCopier:
    """Copies between vLLM's KV tensors and LMCache's chunks by LMCache's own code.

    The seam for another mover: the same two methods. `chunks` are CPU tensors of one
    LMCache chunk each; `blocks` are `blocks_in_chunk` block ids for each chunk.
    """

    def __init__(self, kv_caches: dict[str, torch.Tensor], context: Any) -> None:
        self._kv_caches = kv_caches
        self._format = {
            "layout_hints": context._layout_hints,  # noqa: SLF001
            "engine_kv_format": context._engine_kv_format,  # noqa: SLF001
            "engine_type": context._engine_type,  # noqa: SLF001
        }

    def gather(
        self,
        blocks: list[int],
        blocks_in_chunk: int,
        chunks: list[torch.Tensor] | None,
        indices: list[int] | None,
    ) -> list[torch.Tensor]:
        """KV blocks to chunks; `indices` says which chunks `chunks` are."""
        return gather_paged_kv_to_cpu(
            self._kv_caches,
            blocks,
            blocks_in_chunk,
            out=chunks,
            chunk_indices=indices,
            **self._format,
        )

    def scatter(
        self,
        blocks: list[int],
        blocks_in_chunk: int,
        chunks: list[torch.Tensor],
        skip_tokens: int,
    ) -> None:
        """Chunks to KV blocks, without the first `skip_tokens` of them."""
        scatter_cpu_to_paged_kv(
            self._kv_caches,
            blocks,
            chunks,
            blocks_in_chunk,
            skip_first_n_tokens=skip_tokens,
            **self._format,
        )


class ThreadedTransfer(EngineDrivenTransferContext):
    """LMCache's worker-driven transfer, on our thread."""

    def __init__(
        self,
        instance_id: int,
        req_client: Any,
        thread: MoveThread,
        metrics: MetricsBuffer,
        answer_timeout_s: float,
        make_copier: Callable[[dict[str, torch.Tensor], Any], Any] = LMCacheCopier,
    ) -> None:
        super().__init__(instance_id, req_client)
        self._thread = thread
        self._metrics = metrics
        self._answer_timeout_s = answer_timeout_s
        self._make_copier = make_copier
        self._copier: Any = None
        self.moves: dict[MessagingFuture[bool], Move] = {}

    def register(
        self, kv_caches: dict[str, torch.Tensor], *args: Any, **kw: Any
    ) -> None:
        super().register(kv_caches, *args, **kw)
        self.engine_driven_context.mq_timeout = self._answer_timeout_s
        self._copier = self._make_copier(kv_caches, self)

    def create_recorded_event(self) -> Any:
        if not torch.cuda.is_available():
            return None  # the CPU's forward pass is over when we are called
        event = torch.cuda.Event()
        event.record()
        return event

    def submit_store(
        self,
        _request_id: str,
        key: Any,
        kv_caches: dict[str, torch.Tensor],
        block_ids: list[list[int]],
        event: Any,
        blocks_in_chunk: int,
    ) -> MessagingFuture[bool]:
        (blocks,) = block_ids
        run = partial(self._store, key, blocks, event, blocks_in_chunk)
        return self._submit(run, is_load=False)

    def submit_retrieve(
        self,
        _request_id: str,
        key: Any,
        kv_caches: dict[str, torch.Tensor],
        block_ids: list[list[int]],
        event: Any,
        blocks_in_chunk: int,
        skip_first_n_tokens: int = 0,
    ) -> MessagingFuture[bool]:
        (blocks,) = block_ids
        run = partial(
            self._load, key, blocks, event, blocks_in_chunk, skip_first_n_tokens
        )
        return self._submit(run, is_load=True)

    def flush_inflight_stores(self) -> None:
        """Nothing to wait for: the scheduler's half references what is stored."""

    def retain(self, futures: Iterable[MessagingFuture[bool]]) -> None:
        """Give up all moves but those; their blocks may belong to others now."""
        wanted = {f: self.moves[f] for f in futures if f in self.moves}
        if len(wanted) != len(self.moves):
            self.moves = wanted
            self._thread.retain(wanted.values())

    def _submit(self, run: Callable[[Move], bool], *, is_load: bool) -> Any:
        future: MessagingFuture[bool] = MessagingFuture()
        self.moves[future] = self._thread.submit(
            run, future.set_result, is_load=is_load
        )
        return future

    def _store(
        self, key: Any, blocks: list[int], event: Any, per_chunk: int, move: Move
    ) -> bool:
        context = self.engine_driven_context
        slots = context.prepare_store(key, self._instance_id)
        chunks, indices = slots if slots is not None else (None, None)
        if indices is not None and not indices:
            return True  # all of it is below already, or there is no room for it
        if event is not None:
            event.synchronize()
        with move.copying():
            chunks = self._copier.gather(blocks, per_chunk, chunks, indices)
        ok = bool(context.commit_store(key, self._instance_id, chunks))
        if ok:
            self._metrics.count("tier_bytes", "demoted", _num_bytes(chunks))
        return ok

    def _load(
        self,
        key: Any,
        blocks: list[int],
        event: Any,
        per_chunk: int,
        skip_tokens: int,
        move: Move,
    ) -> bool:
        context = self.engine_driven_context
        chunks = context.prepare_retrieve(key, self._instance_id)
        try:
            if chunks is None or len(chunks) * per_chunk != len(blocks):
                return False
            if event is not None:
                event.synchronize()
            with move.copying():
                self._copier.scatter(blocks, per_chunk, chunks, skip_tokens)
        finally:
            context.commit_retrieve(key, self._instance_id)
        self._metrics.count("tier_bytes", "promoted", _num_bytes(chunks))
        return True


def _num_bytes(chunks: Iterable[torch.Tensor]) -> int:
    return sum(chunk.numel() * chunk.element_size() for chunk in chunks)
