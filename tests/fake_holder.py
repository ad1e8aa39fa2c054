"""A block pool of small integers, and pins as references on its blocks."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from ttlcache.types import PinOutcome, Pressure, ReleaseMode, Shrunk


class FakeHolder:
    """A block pool, and pins as references on its blocks (a `BlockHolder`).

    Free blocks keep their content until they are given out, oldest first. With
    `whole_pins` a pin cannot be shortened, as with several KV cache groups.
    """

    def __init__(
        self, pool_blocks: int, block_tokens: int, *, whole_pins: bool = False
    ) -> None:
        self.pool_blocks = pool_blocks
        self.block_tokens = block_tokens
        self.whole_pins = whole_pins
        self.references: Counter[int] = Counter()
        self.blocks_by_pin: dict[int, list[int]] = {}
        self.num_running = 0
        self.num_waiting = 0
        self.memory_is_short = False
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(pool_blocks))
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    def find(self, hashes: Sequence[bytes]) -> list[int]:
        """Blocks of the longest prefix that is still there."""
        blocks: list[int] = []
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def take(self, blocks: Sequence[int]) -> None:
        """One more reference on each block."""
        for block in blocks:
            self.references[block] += 1
            self._free.pop(block, None)

    def take_new(self, count: int) -> list[int]:
        """Blocks for new content; the caller saw that enough are free."""
        blocks = list(self._free)[:count]
        for block in blocks:
            old_hash = self._hash_of.pop(block, None)
            if old_hash is not None:
                del self._block_of[old_hash]
        self.take(blocks)
        return blocks

    def name(self, blocks: Sequence[int], hashes: Sequence[bytes]) -> None:
        """Content was computed: from now on it can be found by its hash."""
        for block, block_hash in zip(blocks, hashes, strict=True):
            if block_hash not in self._block_of and block not in self._hash_of:
                self._block_of[block_hash] = block
                self._hash_of[block] = block_hash

    def drop(self, blocks: Sequence[int]) -> int:
        """One reference less, tail first; how many blocks became free."""
        freed = 0
        for block in reversed(blocks):
            self.references[block] -= 1
            if not self.references[block]:
                del self.references[block]
                self._free[block] = None
                freed += 1
        return freed

    def hold(self, pin_id: int, blocks: Sequence[int]) -> None:
        """Carry out a `PinOrder`."""
        self.take(blocks)
        self.blocks_by_pin[pin_id] = list(blocks)

    def release(self, pin_id: int, outcome: PinOutcome, mode: ReleaseMode) -> int:
        return self.drop(self.blocks_by_pin.pop(pin_id, []))

    def shrink(self, pin_id: int, drop_blocks: int, mode: ReleaseMode) -> Shrunk | None:
        blocks = self.blocks_by_pin[pin_id]
        if self.whole_pins or drop_blocks >= len(blocks):
            return None
        keep = len(blocks) - drop_blocks
        self.blocks_by_pin[pin_id] = blocks[:keep]
        return Shrunk(self.drop(blocks[keep:]), keep, keep * self.block_tokens)

    def is_freeable(self, pin_id: int) -> bool:
        last = self.blocks_by_pin[pin_id][-1]
        holders = [pin for pin in self.blocks_by_pin.values() if last in pin]
        are_last = all(pin[-1] == last for pin in holders)
        return are_last and self.references[last] == len(holders)

    def count_freeable(self, pin_ids: Iterable[int], enough: int) -> int:
        ours = Counter(
            block for pin_id in pin_ids for block in self.blocks_by_pin[pin_id]
        )
        freeable = sum(self.references[block] == n for block, n in ours.items())
        return min(freeable, enough)

    def pressure(self) -> Pressure:
        return Pressure(
            pool_blocks=self.pool_blocks,
            free_blocks=self.free_blocks,
            pinned_blocks=len(self.pinned_blocks()),
            num_running=self.num_running,
            num_waiting=self.num_waiting,
            memory_is_short=self.memory_is_short,
        )

    def pinned_blocks(self) -> set[int]:
        return {block for blocks in self.blocks_by_pin.values() for block in blocks}
