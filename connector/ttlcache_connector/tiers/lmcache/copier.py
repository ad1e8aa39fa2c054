"""Our engines between vLLM's KV tensors and the memory of an LMCache server.

Called on the copy threads, never on the forward thread. Chunks are LMCache's pinned
shared memory; the bytes go straight there and back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from lmcache.v1.multiprocess.transfer_context.base import (
    EngineDrivenContext,
    compute_kv_layout,
)
from lmcache.v1.multiprocess.transfer_context.shm import EngineDrivenContextShm

from ttlcache.errors import TransferError
from ttlcache.transfer import Direction, plan_copies
from ttlcache.transfer.base import always_wanted
from ttlcache_connector.copy.engines import CopyEngines, make_engines
from ttlcache_connector.copy.kv_layouts import GroupLayout, namespace, read_layout
from ttlcache_connector.log import logger
from ttlcache_lmcache import internals

log = logger(__name__)

#: A copy of one request that takes longer is worth a line in the log.
SLOW_COPY_S = 60.0


class ChunkCopier:
    """Copies between KV blocks and LMCache's chunks, CPU tensors.

    One thread may store while another loads.

    Args:
        group: whose blocks.
        engines: move the bytes; closed by `close`.
    """

    def __init__(self, group: GroupLayout, engines: CopyEngines) -> None:
        self.group = group
        self.name = engines.name
        self._engines = engines
        self._memory: int | None = None

    @classmethod
    def of(
        cls, kv_caches: dict[str, torch.Tensor], kv_cache_config: Any, layout_hints: Any
    ) -> ChunkCopier:
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
        return cls(group, make_engines(next(iter(kv_caches.values())).device))

    def copy(
        self,
        direction: Direction,
        blocks: Sequence[int],
        blocks_in_chunk: int,
        chunks: Sequence[torch.Tensor],
        is_wanted: Callable[[], bool] = always_wanted,
        skip_tokens: int = 0,
    ) -> None:
        """Returns when the bytes are there.

        Args:
            blocks: `blocks_in_chunk` ids for each chunk of the request.
            chunks: host tensors.
            is_wanted: after a no it returns soon, and raises.
            skip_tokens: blocks that lie wholly in them are left out.

        Raises:
            TransferError: nothing may be committed; blocks that were to be loaded hold
                garbage.
        """
        layout = self.group.layout
        needed = layout.chunk_bytes(blocks_in_chunk)
        for chunk in chunks:
            held = chunk.numel() * chunk.element_size()
            if held < needed or not chunk.is_contiguous():
                raise TransferError(
                    f"a chunk of {held} bytes for {blocks_in_chunk} blocks of "
                    f"{layout.block_bytes} bytes"
                )
        skip_blocks = 0
        if skip_tokens and chunks:
            # Of shape [layer, token, …], or [2, layer, token, …].
            skip_blocks = skip_tokens * blocks_in_chunk // int(chunks[0].shape[-2])
        plan = plan_copies(
            direction,
            layout,
            blocks,
            [chunk.data_ptr() for chunk in chunks],
            blocks_in_chunk,
            skip_blocks=skip_blocks,
            owners=tuple(chunks),
        )
        engine = self._engines.engine(direction)
        ticket = engine.submit(plan, is_wanted=is_wanted)
        # However long it takes: blocks and chunks go to others once this returns.
        while not engine.flush(SLOW_COPY_S):
            log.warning("ttlcache: a copy has not ended for %.0f s", SLOW_COPY_S)
        ended = {outcome.ticket: outcome for outcome in engine.poll()}
        outcome = ended[ticket]
        if outcome.failure is not None:
            raise TransferError(f"{outcome.failure.value}: {outcome.detail}")

    def close(self) -> None:
        """Finish copies under way; later ones fail."""
        self._engines.close()

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
