"""Tails of contexts that are below while what stands before them is not."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.request import Request

#: Tails remembered. One that was forgotten is not found, and prefilled.
MEMORY = 4096


class LoneTails:
    """Where they begin: the hashes of the blocks before them."""

    def __init__(self, chunk_tokens: int, block_tokens: int) -> None:
        """
        Args:
            chunk_tokens: of one chunk below; tails begin with one.
            block_tokens: of one block hash.
        """
        self._block_tokens = block_tokens
        self._step = chunk_tokens // block_tokens
        self._before: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._before)

    def add(self, block_hash: bytes) -> None:
        """This block stays above, what follows it goes down."""
        self._before[block_hash] = None
        self._before.move_to_end(block_hash)
        if len(self._before) > MEMORY:
            self._before.popitem(last=False)

    def discard(self, block_hash: bytes) -> None:
        """This block goes down as well."""
        self._before.pop(block_hash, None)

    def clear(self) -> None:
        self._before.clear()

    def last_within(self, request: Request, tokens: int) -> int:
        """Where the last of them begins that the request's first `tokens` reach.

        0: none begins there. One behind a prompt that many share may be another's.
        """
        if not self._before:
            return 0
        size = self._block_tokens
        hashes = request.block_hashes[: tokens // size]
        for end in range(len(hashes) // self._step * self._step, 0, -self._step):
            if hashes[end - 1] in self._before:
                return end * size
        return 0
