"""Pins as reference counts on vLLM's block pool.

A pin is one reference on each of its blocks, nothing else: vLLM frees the
finished request as always, and the next turn finds the blocks by ordinary
prefix caching.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import attrgetter
from typing import TYPE_CHECKING

from ttlcache.types import PinOutcome, Pressure, ReleaseMode, Shrunk
from ttlcache_connector.blocks.recurrent_states import RecurrentStates

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock


# A long context has thousands of blocks, all walked while the engine waits: what is
# done to each of them runs in C where it can.
_block_id = attrgetter("block_id")


def ids_of(blocks: Iterable[KVCacheBlock]) -> Iterator[int]:
    return map(_block_id, blocks)


@dataclass(frozen=True, slots=True)
class Candidate:
    """The pinnable blocks of a finished request, root first; their tokens.

    pinned: how many pins hold each of them, by block id.
    """

    blocks: list[KVCacheBlock]
    kv_tokens: int
    pinned: Mapping[int, int]

    def count_unpinned(self, num_blocks: int) -> int:
        """Of the first so many, those that no pin references."""
        ids = ids_of(self.blocks[:num_blocks])
        return num_blocks - sum(map(self.pinned.__contains__, ids))

    def count_pins(self, num_blocks: int) -> int:
        """How many pins reference the last of the first so many."""
        return self.pinned.get(self.blocks[num_blocks - 1].block_id, 0)


class PinnedBlocks:
    """Which blocks each pin references. Implements `BlockHolder`."""

    def __init__(
        self,
        pool: BlockPool,
        group_block_tokens: Sequence[int],
        queue_counts: Callable[[], tuple[int, int]] = lambda: (0, 0),
        unpinned_refs: Mapping[int, int] | None = None,
        states: RecurrentStates | None = None,
    ) -> None:
        """
        Args:
            group_block_tokens: tokens per block of each KV cache group.
            queue_counts: running and waiting requests right now.
            unpinned_refs: references of `UnpinnedTurns`, by block id, as they change.
            states: of a model with recurrent layers.
        """
        self.states = states
        self.pool = pool
        #: Whether a prefix of a pin is a hit: not with several KV cache groups.
        self.is_divisible = len(group_block_tokens) == 1
        self.memory_is_short = False  # a waiting request lacks some
        #: The blocks of each pin, by its id.
        self.blocks_by_pin: dict[int, list[KVCacheBlock]] = {}
        self._group_block_tokens = tuple(group_block_tokens)
        self._queue_counts = queue_counts
        self._refs: Counter[int] = Counter()
        self._ends: Counter[int] = Counter()  # pins by their last block
        self._unpinned_refs = {} if unpinned_refs is None else unpinned_refs

    def candidate(self, block_ids: tuple[list[int], ...]) -> Candidate:
        """Only blocks with a hash can be hit again; partial ones are left out."""
        blocks: list[KVCacheBlock] = []
        kv_tokens = 0
        for ids, block_tokens in zip(block_ids, self._group_block_tokens, strict=True):
            own = list(map(self.pool.blocks.__getitem__, ids))
            while own and not can_be_hit(own[-1]):
                own.pop()
            kv_tokens = max(kv_tokens, len(own) * block_tokens)
            blocks += [b for b in own if b.block_hash is not None and not b.is_null]
        return Candidate(blocks, kv_tokens, self._refs)

    def hold(self, pin_id: int, blocks: Sequence[KVCacheBlock]) -> None:
        """Reference `blocks` for a pin; they must be referenced or free now."""
        self.pool.touch(blocks)
        self.blocks_by_pin[pin_id] = list(blocks)
        self._refs.update(ids_of(blocks))
        self._ends.update(ids_of(blocks[-1:]))

    def release(self, pin_id: int, outcome: PinOutcome, mode: ReleaseMode) -> int:
        return free_tail_first(self.pool, self.detach(pin_id))

    def detach(self, pin_id: int, keep: int = 0) -> list[KVCacheBlock]:
        """The pin's blocks behind its first `keep`: the caller has their references."""
        blocks = self.blocks_by_pin.get(pin_id, [])
        tail = blocks[keep:]
        count_down(self._ends, blocks[-1:])
        del blocks[keep:]
        self._ends.update(ids_of(blocks[-1:]))
        if not blocks:
            self.blocks_by_pin.pop(pin_id, None)
        count_down(self._refs, tail)
        return tail

    def shrink(self, pin_id: int, drop_blocks: int, mode: ReleaseMode) -> Shrunk | None:
        """Drop references from the tail.

        With several KV cache groups a shortened prefix is not a hit any more
        (the sliding window before its new end is gone), so the pin goes whole.
        """
        keep = len(self.blocks_by_pin.get(pin_id, ())) - max(0, drop_blocks)
        if not self.is_divisible or keep <= 0:
            return None
        freed = free_tail_first(self.pool, self.detach(pin_id, keep))
        return Shrunk(freed, keep, keep * self._group_block_tokens[0])

    def is_freeable(self, pin_id: int) -> bool:
        blocks = self.blocks_by_pin.get(pin_id, [])
        if not self.is_divisible or not blocks:
            return any(b.ref_cnt == self._refs[b.block_id] for b in reversed(blocks))
        last_id, ref_cnt = blocks[-1].block_id, blocks[-1].ref_cnt
        pins = self._refs[last_id]
        if self._ends[last_id] < pins:
            return False  # a longer pin goes first
        return bool(ref_cnt == pins + self._unpinned_refs.get(last_id, 0))

    def count_freeable(self, pin_ids: Iterable[int], enough: int) -> int:
        freeable, refs, table = 0, self._refs, self.pool.blocks
        # A block of n pins becomes free with the last of them. Each pin is walked from
        # its end, and stops there until all n have come; those that begin alike then go
        # on as one.
        arrived: Counter[int] = Counter()
        stopped: dict[int, Counter[tuple[int, ...]]] = {}
        for pin_id in pin_ids:
            walks = [(tuple(ids_of(self.blocks_by_pin.get(pin_id, ()))), 1)]
            while walks:  # from the end: a block is free with all that lie behind it
                ids, pins = walks.pop()
                fewest: list[int] = []  # pins that hold any block up to this one
                for left in reversed(range(len(ids))):
                    block_id, ours = ids[left], refs[ids[left]]
                    used = ours + self._unpinned_refs.get(block_id, 0)
                    if table[block_id].ref_cnt > used:
                        if self.is_divisible:
                            break  # who uses it uses all that stand before it
                        continue
                    stops = False
                    if ours <= pins:
                        freeable += 1
                    else:  # free once the last of these pins ends
                        arrived[block_id] += pins
                        # Where vLLM computed a block twice, pins begin differently.
                        fewest = fewest or [
                            *accumulate(map(refs.__getitem__, ids), min)
                        ]
                        stops = self.is_divisible and fewest[left] >= ours
                        if stops:
                            stopped.setdefault(block_id, Counter())[ids[:left]] += pins
                        if arrived[block_id] == ours:
                            freeable += 1
                            walks += stopped.pop(block_id, Counter()).items()
                    if freeable >= enough:
                        return freeable
                    if stops:
                        break
        return freeable

    def pressure(self) -> Pressure:
        num_running, num_waiting = self._queue_counts()
        return Pressure(
            pool_blocks=usable_blocks(self.pool),
            free_blocks=self.pool.get_num_free_blocks(),
            pinned_blocks=len(self._refs),
            num_running=num_running,
            num_waiting=num_waiting,
            memory_is_short=self.memory_is_short,
        )

    def references(self) -> dict[int, int]:
        """Our references per block id, for the invariant checker."""
        return dict(self._refs + self.states.refs if self.states else self._refs)

    def drop_all(self) -> int:
        """Give back every reference, whatever any table says; returns blocks freed.

        The last resort: it asks nothing that may have failed before.
        """
        if self.states is not None:
            self.states.drop_all()
        freed = 0
        while self.blocks_by_pin:
            pin_id = next(iter(self.blocks_by_pin))
            freed += free_tail_first(self.pool, self.detach(pin_id))
        return freed


def usable_blocks(pool: BlockPool) -> int:
    """All but vLLM's null block."""
    return int(pool.num_gpu_blocks) - 1


def free_tail_first(pool: BlockPool, blocks: Sequence[KVCacheBlock]) -> int:
    """Give references back so that prefixes are evicted last; returns blocks freed."""
    if not blocks:
        return 0
    before = pool.get_num_free_blocks()
    pool.free_blocks(reversed(blocks))
    return int(pool.get_num_free_blocks() - before)


def can_be_hit(block: KVCacheBlock) -> bool:
    # Blocks outside a sliding window were replaced by the null block.
    return block.block_hash is not None and not block.is_null


def count_down(refs: Counter[int], blocks: Sequence[KVCacheBlock]) -> None:
    """One reference less of each block."""
    for block_id in ids_of(blocks):
        count = refs[block_id]
        if count > 1:
            refs[block_id] = count - 1
        else:
            refs.pop(block_id, None)  # quicker than a Counter's own `del`
