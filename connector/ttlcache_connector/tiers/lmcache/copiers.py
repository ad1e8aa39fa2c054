"""Who copies a request's bytes between vLLM's KV tensors and LMCache's chunks.

Chunks are CPU tensors of one LMCache chunk each; `blocks` are `per_chunk` block ids for
each chunk. What the blocks depend on has happened when a copier is called.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from lmcache.v1.multiprocess.transfer_context.base import (
    EngineDrivenContext,
    compute_kv_layout,
    gather_paged_kv_to_cpu,
    scatter_cpu_to_paged_kv,
)
from lmcache.v1.multiprocess.transfer_context.shm import EngineDrivenContextShm

from ttlcache.errors import TransferError
from ttlcache_connector.copy.block_copier import BlockCopier
from ttlcache_lmcache import internals

Chunks = list[torch.Tensor]


class Copier(ABC):
    """Called on the mover thread; raises for a copy that did not happen."""

    name: str

    def attach(self, context: EngineDrivenContext) -> None:  # noqa: B027
        """A server answered, this is its memory; again after every restart.

        Raises:
            TransferError: this copier cannot reach it.
        """

    def detach(self) -> None:  # noqa: B027
        """That memory goes away; `attach` follows, or the end."""

    @abstractmethod
    def gather(
        self, blocks: list[int], per_chunk: int, chunks: Chunks | None
    ) -> Chunks:
        """KV blocks to chunks, to new ones where the server shares no memory."""

    @abstractmethod
    def scatter(
        self, blocks: list[int], per_chunk: int, chunks: Chunks, skip_tokens: int
    ) -> None:
        """Chunks to KV blocks, without the first `skip_tokens` of them."""

    def close(self) -> None:  # noqa: B027
        """No copy follows."""


class OwnCopier(Copier):
    """Our transfer path: `ttlcache.transfer` between vLLM's addresses and LMCache's."""

    def __init__(
        self,
        kv_caches: dict[str, torch.Tensor],
        kv_cache_config: Any,
        layout_hints: Any,
    ) -> None:
        """
        Raises:
            TransferError: it cannot serve these tensors; the text says why.
        """
        self._blocks = BlockCopier.make(kv_caches, kv_cache_config)
        self.name = self._blocks.engine_name
        self._device = next(iter(kv_caches.values())).device
        self._memory: int | None = None
        self._shape, self._dtype = torch.Size(), torch.uint8
        ours = self._blocks.group.layout.block_bytes
        theirs = _block_bytes(kv_caches, layout_hints)
        if ours != theirs:
            self.close()
            raise TransferError(
                f"blocks of {ours} bytes, for which LMCache has {theirs}"
            )

    def attach(self, context: EngineDrivenContext) -> None:
        (self._shape,) = context.layout_desc.shapes
        (self._dtype,) = context.layout_desc.dtypes
        if isinstance(context, EngineDrivenContextShm):
            address, num_bytes, is_pinned = internals.shared_memory(context)
            self._blocks.adopt_host(address, num_bytes, is_pinned=is_pinned)
            self._memory = address
        elif self._device.type != "cpu":
            raise TransferError(
                "LMCache's server shares no memory with this worker: it needs "
                "--shm-name, --no-l1-use-lazy, room in the same /dev/shm and the same "
                "user; ttlcache serve-tiers sets the flags"
            )

    def detach(self) -> None:
        if self._memory is not None:
            self._blocks.forget_host(self._memory)
            self._memory = None

    def gather(
        self, blocks: list[int], per_chunk: int, chunks: Chunks | None
    ) -> Chunks:
        if chunks is None:
            count = len(blocks) // per_chunk
            chunks = [torch.empty(self._shape, dtype=self._dtype) for _ in range(count)]
        return self._blocks.gather(blocks, per_chunk, chunks)

    def scatter(
        self, blocks: list[int], per_chunk: int, chunks: Chunks, skip_tokens: int
    ) -> None:
        self._blocks.scatter(blocks, per_chunk, chunks, skip_tokens)

    def close(self) -> None:
        self._blocks.close()


class LMCacheCopier(Copier):
    """LMCache's own code, for KV tensors in CPU memory that our path refuses."""

    name = "lmcache"

    def __init__(self, kv_caches: dict[str, torch.Tensor], layout_hints: Any) -> None:
        self._kv_caches = kv_caches
        self._hints = layout_hints

    def gather(
        self, blocks: list[int], per_chunk: int, chunks: Chunks | None
    ) -> Chunks:
        gathered: Chunks = gather_paged_kv_to_cpu(
            self._kv_caches, blocks, per_chunk, layout_hints=self._hints, out=chunks
        )
        return gathered

    def scatter(
        self, blocks: list[int], per_chunk: int, chunks: Chunks, skip_tokens: int
    ) -> None:
        scatter_cpu_to_paged_kv(
            self._kv_caches,
            blocks,
            chunks,
            per_chunk,
            skip_first_n_tokens=skip_tokens,
            layout_hints=self._hints,
        )


def _block_bytes(kv_caches: dict[str, torch.Tensor], layout_hints: Any) -> int:
    """What LMCache reserves for a block of these tensors."""
    block, layers, hidden, dtype, _, planes = compute_kv_layout(
        kv_caches, layout_hints=layout_hints
    )
    item_bytes: int = getattr(torch, dtype).itemsize
    num_bytes: int = block * layers * hidden * planes * item_bytes
    return num_bytes
