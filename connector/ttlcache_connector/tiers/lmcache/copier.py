"""Our engines between vLLM's KV tensors and the memory of an LMCache server."""

from __future__ import annotations

from typing import Any

import torch
from lmcache.v1.multiprocess.transfer_context.base import (
    EngineDrivenContext,
    compute_kv_layout,
)
from lmcache.v1.multiprocess.transfer_context.shm import EngineDrivenContextShm

from ttlcache.errors import TransferError
from ttlcache_connector.copy.engines import make_engines
from ttlcache_connector.copy.kv_layouts import namespace, read_layout
from ttlcache_connector.tiers.lmcache.block_copier import BlockCopier
from ttlcache_lmcache import internals


class ChunkCopier(BlockCopier):
    """Copies between KV blocks and chunks: CPU tensors of one LMCache chunk each."""

    def __init__(
        self,
        kv_caches: dict[str, torch.Tensor],
        kv_cache_config: Any,
        layout_hints: Any,
    ) -> None:
        """
        Raises:
            TransferError: our engines cannot serve these tensors; the text says why.
        """
        group = read_layout(kv_caches, kv_cache_config)
        if not group.token_major and not namespace(kv_cache_config):
            # LMCache would take our bytes for its own.
            raise TransferError(
                f"layout {group.layout.name}, but another order than LMCache's"
            )
        ours, theirs = group.layout.block_bytes, _block_bytes(kv_caches, layout_hints)
        if ours != theirs:
            raise TransferError(
                f"blocks of {ours} bytes, for which LMCache has {theirs}"
            )
        super().__init__(group, make_engines(next(iter(kv_caches.values())).device))
        self._memory: int | None = None

    def attach(self, context: EngineDrivenContext) -> None:
        """A server answered, this is its memory; again after every restart.

        Raises:
            TransferError: the device cannot reach it.
        """
        if not isinstance(context, EngineDrivenContextShm):
            raise TransferError(
                "LMCache's server shares no memory with this worker: it needs "
                "--shm-name, --no-l1-use-lazy, room in the same /dev/shm and the same "
                "user; ttlcache serve-tiers sets the flags"
            )
        address, num_bytes, is_pinned = internals.shared_memory(context)
        self._engines.add_host(address, num_bytes, is_pinned=is_pinned)
        self._memory = address

    def detach(self) -> None:
        """That memory goes away; `attach` follows, or the end."""
        if self._memory is not None:
            self._engines.forget_host(self._memory)
            self._memory = None


def _block_bytes(kv_caches: dict[str, torch.Tensor], layout_hints: Any) -> int:
    """What LMCache reserves for a block of these tensors."""
    block, layers, hidden, dtype, _, planes = compute_kv_layout(
        kv_caches, layout_hints=layout_hints
    )
    item_bytes: int = getattr(torch, dtype).itemsize
    num_bytes: int = block * layers * hidden * planes * item_bytes
    return num_bytes
