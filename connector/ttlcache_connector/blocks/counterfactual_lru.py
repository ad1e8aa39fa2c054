"""When plain vLLM's prefix cache would have evicted what a pin holds.

vLLM takes blocks from the front of its queue of free blocks. A finished request's
cached blocks go to the end of it, its last one first; blocks without a hash go to the
front. So plain vLLM evicts a turn's last block once more blocks were taken than stood
before it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock


class CounterfactualLRU:
    """The queue of free blocks as it would be if nothing was pinned, as one count."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        #: Blocks that the queue's front has moved on by.
        self.taken_blocks = 0
        #: The same when the last request looked for its prompt: what it takes itself
        #: comes after that.
        self.taken_at_lookup = 0
        self._get_new_blocks = pool.get_new_blocks
        shadowed: Any = pool  # this one object's method, not the class's
        shadowed.get_new_blocks = self.get_new_blocks

    def get_new_blocks(self, *args: Any, **kwargs: Any) -> list[KVCacheBlock]:
        """`BlockPool.get_new_blocks`, counted."""
        blocks = self._get_new_blocks(*args, **kwargs)
        self.taken_blocks += len(blocks)
        return blocks

    def on_lookup(self) -> None:
        """The prefix cache was asked for a request that may get its blocks next."""
        self.taken_at_lookup = self.taken_blocks

    def on_request_end(self, block_ids: tuple[list[int], ...]) -> None:
        """Its last blocks, in each group, have no hash: those are taken next."""
        table = self._pool.blocks
        for ids in block_ids:
            for block_id in reversed(ids):
                if can_be_hit(table[block_id]):
                    break
                self.taken_blocks -= not table[block_id].is_null

    def on_recompute(self, blocks: int) -> None:
        """Plain vLLM would take so many more, for what a pin spared."""
        self.taken_blocks += blocks


def can_be_hit(block: KVCacheBlock) -> bool:
    # Blocks outside a sliding window were replaced by the null block.
    return block.block_hash is not None and not block.is_null
