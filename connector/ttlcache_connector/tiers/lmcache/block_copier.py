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
from ttlcache_connector.copy.engines import CopyEngines
from ttlcache_connector.copy.kv_layouts import GroupLayout
from ttlcache_connector.log import logger

if TYPE_CHECKING:
    import torch

log = logger(__name__)

#: A copy of one request that takes longer is worth a line in the log.
SLOW_COPY_S = 60.0


class BlockCopier:
    """Copies blocks into chunks and chunks into blocks.

    One thread may store while another loads.

    Args:
        group: whose blocks.
        engines: move the bytes; closed by `close`.
    """

    def __init__(self, group: GroupLayout, engines: CopyEngines) -> None:
        self.group = group
        self.name = engines.name
        self._engines = engines

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
