"""Copies that were ordered and have not begun: their blocks stay until then."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock


#: So long a waiting request lets a copy take before it takes the blocks.
COPY_WAIT_S = 0.25


@dataclass(slots=True)
class _Copy:
    """due_s: when a waiting request may take the blocks all the same."""

    blocks: list[KVCacheBlock]
    due_s: float


class PendingCopies:
    """Of ended turns, oldest first."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._copies: dict[str, _Copy] = {}

    def __len__(self) -> int:
        return len(self._copies)

    def __iter__(self) -> Iterator[str]:
        """The turns' request ids; they may be popped meanwhile."""
        return iter(list(self._copies))

    @property
    def blocks(self) -> list[KVCacheBlock]:
        return [block for copy in self._copies.values() for block in copy.blocks]

    @property
    def awaited_blocks(self) -> int:
        """Blocks for which a waiting request should wait."""
        now_s = self._now_s()
        copies = self._copies.values()
        return sum(len(copy.blocks) for copy in copies if copy.due_s > now_s)

    def add(self, request_id: str, blocks: list[KVCacheBlock]) -> None:
        """These come before those of the turn that were given up earlier."""
        copy = self._copies.get(request_id)
        if copy is None:
            due_s = self._now_s() + COPY_WAIT_S
            self._copies[request_id] = _Copy(blocks, due_s)
        else:
            copy.blocks = blocks + copy.blocks

    def of(self, request_id: str) -> list[KVCacheBlock]:
        copy = self._copies.get(request_id)
        return [] if copy is None else copy.blocks

    def pop(self, request_id: str) -> list[KVCacheBlock]:
        copy = self._copies.pop(request_id, None)
        return [] if copy is None else copy.blocks

    def is_overdue(self, request_id: str) -> bool:
        return self._copies[request_id].due_s <= self._now_s()
