"""Copies KV blocks between vLLM's tensors and the lower tier's chunks by our engines.

Called on the copy threads, never on the forward thread. Chunks are host memory of the
tier (LMCache's pinned shared memory); the bytes go straight there and back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ttlcache.errors import TransferError
from ttlcache.transfer import Direction, plan_copies
from ttlcache.transfer.base import always_wanted
from ttlcache_connector.copy.kv_layouts import GroupLayout
from ttlcache_connector.copy.lanes import Lanes
from ttlcache_connector.log import logger

if TYPE_CHECKING:
    import torch

log = logger(__name__)

#: A copy of one request that takes longer is worth a line in the log.
SLOW_COPY_S = 60.0


class BlockCopier:
    """Gathers blocks into chunks and scatters chunks into blocks.

    One thread may gather while another scatters.

    Args:
        group: whose blocks.
        lanes: move the bytes; closed by `close`.
    """

    def __init__(self, group: GroupLayout, lanes: Lanes) -> None:
        self.group = group
        self._lanes = lanes

    def gather(
        self,
        blocks: Sequence[int],
        blocks_in_chunk: int,
        chunks: Sequence[torch.Tensor],
        is_wanted: Callable[[], bool] = always_wanted,
    ) -> None:
        """Blocks to chunks; returns when the bytes are there.

        Args:
            blocks: `blocks_in_chunk` ids for each chunk of the request.
            chunks: host tensors to fill.
            is_wanted: after a no it returns soon, and raises.

        Raises:
            TransferError: nothing may be committed.
        """
        self._copy(Direction.STORE, blocks, blocks_in_chunk, chunks, 0, is_wanted)

    def scatter(
        self,
        blocks: Sequence[int],
        blocks_in_chunk: int,
        chunks: Sequence[torch.Tensor],
        skip_tokens: int = 0,
        is_wanted: Callable[[], bool] = always_wanted,
    ) -> None:
        """Chunks to blocks, without the blocks that lie wholly in `skip_tokens`.

        Raises:
            TransferError: the blocks hold garbage and must count as not loaded.
        """
        # The chunks' shape is [layer, token, …], or [2, layer, token, …].
        tokens = int(chunks[0].shape[-2]) // blocks_in_chunk if chunks else 0
        skip = skip_tokens // tokens if tokens else 0
        self._copy(Direction.LOAD, blocks, blocks_in_chunk, chunks, skip, is_wanted)

    def close(self) -> None:
        """Finish copies under way; later ones fail."""
        self._lanes.close()

    def _copy(
        self,
        direction: Direction,
        blocks: Sequence[int],
        blocks_in_chunk: int,
        chunks: Sequence[torch.Tensor],
        skip_blocks: int,
        is_wanted: Callable[[], bool],
    ) -> None:
        layout = self.group.layout
        needed = layout.chunk_bytes(blocks_in_chunk)
        for chunk in chunks:
            held = chunk.numel() * chunk.element_size()
            if held < needed or not chunk.is_contiguous():
                raise TransferError(
                    f"a chunk of {held} bytes for {blocks_in_chunk} blocks of "
                    f"{layout.block_bytes} bytes"
                )
        plan = plan_copies(
            direction,
            layout,
            blocks,
            [chunk.data_ptr() for chunk in chunks],
            blocks_in_chunk,
            skip_blocks=skip_blocks,
            owners=tuple(chunks),
        )
        engine = self._lanes.engine(direction)
        ticket = engine.submit(plan, is_wanted=is_wanted)
        # However long it takes: blocks and chunks go to others once this returns.
        while not engine.flush(SLOW_COPY_S):
            log.warning("ttlcache: a copy has not ended for %.0f s", SLOW_COPY_S)
        ended = {outcome.ticket: outcome for outcome in engine.poll()}
        outcome = ended[ticket]
        if outcome.failure is not None:
            raise TransferError(f"{outcome.failure.value}: {outcome.detail}")
