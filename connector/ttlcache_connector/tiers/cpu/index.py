"""What is in host memory: found by vLLM's own prefix lookup, kept by deadline.

A second `BlockPool` of vLLM's stands for the host memory, with the model's own cache
groups: which blocks a hit needs (all of full attention, a window's last ones, the last
state) is decided by the same code as for GPU memory. A stored turn holds references on
its blocks there; when memory gets short, the turn whose time was over first gives its
references up. Its blocks can still be hit until others take them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from sortedcontainers import SortedList

from ttlcache_connector.engine import vllm_internals

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import KVCacheBlock


class HeldBlocks:
    """References on a pool's blocks; each call costs O(its blocks)."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self.counts: Counter[int] = Counter()  # by block id

    def hold(self, blocks: Sequence[KVCacheBlock]) -> None:
        self._pool.touch(blocks)
        self.adopt(blocks)

    def adopt(self, blocks: Sequence[KVCacheBlock]) -> None:
        """References that exist are counted here from now on."""
        self.counts.update(block.block_id for block in blocks)

    def detach(self, blocks: Sequence[KVCacheBlock]) -> None:
        """These references are not counted here any more; they stay."""
        for block in blocks:
            self.counts[block.block_id] -= 1
            if not self.counts[block.block_id]:
                del self.counts[block.block_id]

    def release(self, blocks: Sequence[KVCacheBlock]) -> None:
        self.detach(blocks)
        self._pool.free_blocks(reversed(blocks))


class Found(NamedTuple):
    """A hit; its blocks stay until others are stored.

    blocks: per cache group, from the first token after `hit_tokens` on; null blocks
        stand for those that the group does not need.
    hit_tokens: what GPU memory holds of the request.
    tokens: beyond that.
    """

    blocks: tuple[list[KVCacheBlock], ...]
    hit_tokens: int
    tokens: int


@dataclass(slots=True)
class StoredTurn:
    """blocks: in the host's pool, on which the turn has a reference each."""

    program: str | None
    deadline_s: float
    blocks: list[KVCacheBlock]

    @property
    def last_block_id(self) -> int:
        return int(self.blocks[-1].block_id)


class HostIndex:
    """Blocks of host memory by content, and the turns that keep them."""

    def __init__(
        self, num_blocks: int, vllm_config: Any, manager: KVCacheManager
    ) -> None:
        """
        Args:
            num_blocks: of the host's pool; one of them is the null block.
            manager: of the GPU's pool.
        """
        self._coordinator = vllm_internals.coordinator_like(
            manager, vllm_config, num_blocks
        )
        self._pool = self._coordinator.block_pool
        self._locks = HeldBlocks(self._pool)  # of copies
        self._turns: dict[str, StoredTurn] = {}
        self._by_deadline: SortedList[tuple[float, str]] = SortedList()
        self.version = 0  # changes with what can be found
        # By last block: any number of requests may end alike, and take no memory.
        self._by_last_block: dict[int, str] = {}
        self._of_program: dict[str, set[str]] = {}

    def block_of(self, block_hash: Any) -> KVCacheBlock | None:
        """The block that holds the same as one of GPU memory."""
        return vllm_internals.cached_block(self._pool, block_hash)

    @property
    def used_blocks(self) -> int:
        """Blocks that turns or copies hold."""
        return int(self._pool.num_gpu_blocks - 1 - self._pool.get_num_free_blocks())

    # --- lookups ---------------------------------------------------------

    def find(
        self, hashes: Sequence[Any], hit_tokens: int, max_tokens: int
    ) -> Found | None:
        """The longest hit.

        Args:
            hashes: of the request's tokens after `hit_tokens`.
            max_tokens: of the hit.
        """
        blocks, tokens, *_ = self._coordinator.find_longest_cache_hit(
            hashes, max_tokens
        )
        if not tokens:
            return None
        return Found(tuple(list(group) for group in blocks), hit_tokens, int(tokens))

    def lock(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Nothing takes these blocks until `unlock`."""
        self._locks.hold(blocks)

    def unlock(self, blocks: Sequence[KVCacheBlock]) -> None:
        self._locks.release(blocks)

    # --- stored turns ----------------------------------------------------

    def count_obtainable(self) -> int:
        """Blocks that would be free without any stored turn."""
        return int(self._pool.num_gpu_blocks - 1 - len(self._locks.counts))

    def make_room(self, count: int) -> list[KVCacheBlock]:
        """Up to so many blocks to store into; the earliest deadline gives way first.

        No turn gives way to one that would not fit whole all the same.
        Each has one reference, which is the caller's until `unlock` or `keep`.
        """
        if count <= self.count_obtainable():
            while self._pool.get_num_free_blocks() < count and self._turns:
                self.drop(self._by_deadline[0][1])
        free = min(count, self._pool.get_num_free_blocks())
        blocks = list(self._pool.get_new_blocks(free))
        self.version += 1
        self._locks.adopt(blocks)
        return blocks

    def set_content(
        self, block: KVCacheBlock, hashes: vllm_internals.BlockHashes
    ) -> KVCacheBlock:
        """What the block holds: it can be found from now on.

        Returns:
            The block, or one that holds the same already, and has its reference.
        """
        (block_hash, *_), _ = hashes
        there = self.block_of(block_hash)
        if there is None:
            vllm_internals.set_hashes(self._pool, block, hashes)
            self.version += 1
            return block
        self.lock([there])
        self.unlock([block])
        return there

    def keep(self, request_id: str, turn: StoredTurn) -> None:
        """A turn is stored; its references on its blocks are the index's now.

        One that ends with the same block is dropped for it.
        """
        self.drop(request_id)
        if not turn.blocks:
            return
        self._locks.detach(turn.blocks)
        last = turn.last_block_id
        alike = self._turns.get(self._by_last_block.get(last, ""))
        if alike is not None:
            turn.deadline_s = max(turn.deadline_s, alike.deadline_s)
            if turn.program != alike.program:
                turn.program = None  # the end of one drops it not for the other
            self.drop(self._by_last_block[last])
        self._turns[request_id], self._by_last_block[last] = turn, request_id
        self._by_deadline.add((turn.deadline_s, request_id))
        if turn.program is not None:
            # An earlier turn of which this one is a continuation keeps nothing alone.
            ids = {block.block_id for block in turn.blocks}
            for earlier in list(self._of_program.get(turn.program, ())):
                blocks = self._turns[earlier].blocks
                if ids.issuperset(block.block_id for block in reversed(blocks)):
                    self.drop(earlier)
            self._of_program.setdefault(turn.program, set()).add(request_id)

    def drop(self, request_id: str) -> None:
        """The turn gives its references up."""
        turn = self._turns.pop(request_id, None)
        if turn is None:
            return
        del self._by_last_block[turn.last_block_id]
        self._by_deadline.remove((turn.deadline_s, request_id))
        if turn.program is not None:
            own = self._of_program[turn.program]
            own.discard(request_id)
            if not own:
                del self._of_program[turn.program]
        self._pool.free_blocks(reversed(turn.blocks))

    def drop_program(self, program: str) -> None:
        """Its turns are not continued."""
        for request_id in list(self._of_program.get(program, ())):
            self.drop(request_id)

    def forget(self, blocks: Iterable[KVCacheBlock]) -> None:
        """What these blocks hold cannot be found any more."""
        self.version += 1
        self._pool.evict_blocks({b.block_id for b in blocks if not b.is_null})

    def clear(self) -> None:
        """Nothing of what is stored can be found any more."""
        for request_id in list(self._turns):
            self.drop(request_id)
        self.forget(self._pool.blocks)
