"""Copies KV blocks between vLLM's tensors and the lower tier's chunks by our engines.

Called on the mover thread, never on the forward thread. Chunks are host memory of the
tier (LMCache's pinned shared memory); the bytes go straight there and back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ttlcache.errors import TransferError
from ttlcache.transfer import (
    Direction,
    ReferenceEngine,
    TransferEngine,
    plan_copies,
)
from ttlcache_connector.copy.kv_layouts import GroupLayout, namespace, read_layout
from ttlcache_connector.log import logger

if TYPE_CHECKING:
    import torch

log = logger(__name__)

#: A copy of one request that takes longer is worth a line in the log.
SLOW_COPY_S = 60.0


def make_engine(device: torch.device) -> TransferEngine:
    """The engine for tensors on `device`, calibrated.

    Raises:
        TransferError: no engine of ours serves it.
    """
    if device.type == "cpu":
        return ReferenceEngine()
    if device.type != "cuda":
        raise TransferError(f"no transfer engine for {device.type} tensors")
    from ttlcache.transfer.calibrate import calibrate
    from ttlcache.transfer.cuda import CudaError
    from ttlcache.transfer.cupy_engine import CupyEngine
    from ttlcache.transfer.cupy_runtime import CupyRuntime

    runtime = CupyRuntime(device.index or 0)
    try:
        return CupyEngine(runtime, calibrate(runtime))
    except CudaError as error:
        raise TransferError(str(error)) from error


class BlockCopier:
    """Gathers blocks into chunks and scatters chunks into blocks.

    Args:
        group: whose blocks.
        engine: moves the bytes; closed by `close`.
    """

    def __init__(self, group: GroupLayout, engine: TransferEngine) -> None:
        self.group = group
        self._engine = engine

    @classmethod
    def make(
        cls, kv_caches: Mapping[str, torch.Tensor], kv_cache_config: Any
    ) -> BlockCopier:
        """A copier for what vLLM registered.

        Raises:
            TransferError: our path cannot serve it: use the tier's own mover, and
                say why.
        """
        group = read_layout(kv_caches, kv_cache_config)
        if not group.token_major and not namespace(kv_cache_config):
            # LMCache would take our bytes for its own.
            raise TransferError(
                f"layout {group.layout.name}, but another order than LMCache's"
            )
        engine = make_engine(next(iter(kv_caches.values())).device)
        log.info(
            "ttlcache: KV blocks of %d bytes (%s) move by the %s engine",
            group.layout.block_bytes,
            group.layout.name,
            engine.name,
        )
        return cls(group, engine)

    @property
    def engine_name(self) -> str:
        return self._engine.name

    def adopt_host(self, address: int, num_bytes: int, *, is_pinned: bool) -> None:
        """Tell of the chunks' memory before the first copy; pins it if need be.

        Raises:
            TransferError: the device refuses to pin it.
        """
        pinned = getattr(self._engine, "pinned", None)
        if pinned is None:
            return
        from ttlcache.transfer.cuda import CudaError

        try:
            (pinned.adopt if is_pinned else pinned.pin)(address, num_bytes)
        except CudaError as error:
            raise TransferError(str(error)) from error

    def forget_host(self, address: int) -> None:
        """Chunks there are not copied any more; their memory may be unmapped."""
        pinned = getattr(self._engine, "pinned", None)
        if pinned is None:
            return
        from ttlcache.transfer.cuda import CudaError

        # A device that refuses has lost the memory already.
        with contextlib.suppress(CudaError):
            pinned.release(address)

    def gather(
        self,
        blocks: Sequence[int],
        blocks_in_chunk: int,
        chunks: Sequence[torch.Tensor],
    ) -> list[torch.Tensor]:
        """Blocks to chunks; returns when the bytes are there.

        Args:
            blocks: `blocks_in_chunk` ids for each chunk of the request.
            chunks: host tensors to fill.

        Raises:
            TransferError: nothing may be committed.
        """
        self._copy(Direction.STORE, blocks, blocks_in_chunk, chunks, 0)
        return list(chunks)

    def scatter(
        self,
        blocks: Sequence[int],
        blocks_in_chunk: int,
        chunks: Sequence[torch.Tensor],
        skip_tokens: int = 0,
    ) -> None:
        """Chunks to blocks, without the blocks that lie wholly in `skip_tokens`.

        Raises:
            TransferError: the blocks hold garbage and must count as not loaded.
        """
        # The chunks' shape is [layer, token, …], or [2, layer, token, …].
        tokens = int(chunks[0].shape[-2]) // blocks_in_chunk if chunks else 0
        skip = skip_tokens // tokens if tokens else 0
        self._copy(Direction.LOAD, blocks, blocks_in_chunk, chunks, skip)

    def close(self) -> None:
        """Finish copies under way; later ones fail."""
        self._engine.close()

    def _copy(
        self,
        direction: Direction,
        blocks: Sequence[int],
        blocks_in_chunk: int,
        chunks: Sequence[torch.Tensor],
        skip_blocks: int,
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
        ticket = self._engine.submit(plan)
        # However long it takes: whoever is told that a copy is over, well or not, gives
        # its blocks and chunks to somebody else. A copy that failed is over, too.
        while not self._engine.flush(SLOW_COPY_S):
            log.warning("ttlcache: a copy has not ended for %.0f s", SLOW_COPY_S)
        ended = {outcome.ticket: outcome for outcome in self._engine.poll()}
        outcome = ended.get(ticket)
        if outcome is None:
            raise TransferError("the engine did not say how the copy ended")
        if outcome.failure is not None:
            raise TransferError(f"{outcome.failure.value}: {outcome.detail}")
