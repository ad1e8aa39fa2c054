"""Cached states of recurrent layers: the next turn of a request begins from the last.

vLLM caches a state at a block's end, and the request gives that block up when it has
the next one: at its end it has blocks of attention, and a running state that cannot be
hit. Under pressure other requests take what it gave up, so the last cached states
of a request under way get a reference from us.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.request import RequestStatus

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request


@dataclass(slots=True)
class _UnderWay:
    """A request that holds its blocks; `states`: blocks that we reference for it.

    whole_blocks: of its tokens when these were looked up.
    """

    request: Request
    whole_blocks: int = 0
    states: list[KVCacheBlock] = field(default_factory=list)


class RecurrentStates:
    """References on the cached states of requests under way."""

    def __init__(
        self, manager: KVCacheManager, block_tokens: Mapping[int, int]
    ) -> None:
        """
        Args:
            block_tokens: of each cache group of recurrent layers, by its index.
        """
        self._coordinator, self._pool = manager.coordinator, manager.block_pool
        self._groups, self._block_tokens = [*block_tokens], max(block_tokens.values())
        self._under_way: dict[str, _UnderWay] = {}
        #: By block id.
        self.refs: Counter[int] = Counter()

    @classmethod
    def of(cls, manager: KVCacheManager) -> RecurrentStates | None:
        """None: the model has no such layers."""
        groups = enumerate(manager.kv_cache_config.kv_cache_groups)
        specs = {index: group.kv_cache_spec for index, group in groups}
        states = {i: s.block_size for i, s in specs.items() if isinstance(s, MambaSpec)}
        return cls(manager, states) if states else None

    def on_allocated(self, request: Request) -> None:
        self._under_way.setdefault(request.request_id, _UnderWay(request))

    def before_step(self) -> None:
        """Of each request under way its last cached states, and no others."""
        for request_id, each in list(self._under_way.items()):
            request, status = each.request, each.request.status
            if status is RequestStatus.PREEMPTED or RequestStatus.is_finished(status):
                self.release(request_id)
                continue
            whole_blocks = request.num_computed_tokens // self._block_tokens
            if whole_blocks == each.whole_blocks:
                continue
            hit = self.blocks_of_hit(request)
            states = [b for index in self._groups for b in hit[index] if not b.is_null]
            self._pool.touch(states)
            self.refs.update(block.block_id for block in states)
            self._free(each.states)
            each.states, each.whole_blocks = states, whole_blocks

    def blocks_of_hit(self, request: Request) -> tuple[list[KVCacheBlock], ...]:
        """Of each cache group, what a hit of the whole context needs now."""
        blocks, *_ = self._coordinator.find_longest_cache_hit(
            request.block_hashes, request.num_tokens
        )
        return tuple(list(group) for group in blocks)

    def release(self, request_id: str) -> None:
        """The request gives its blocks up."""
        each = self._under_way.pop(request_id, None)
        if each is not None:
            self._free(each.states)

    def drop_all(self) -> None:
        for request_id in list(self._under_way):
            self.release(request_id)

    def _free(self, states: list[KVCacheBlock]) -> None:
        self.refs -= Counter(block.block_id for block in states)
        self._pool.free_blocks(states)
