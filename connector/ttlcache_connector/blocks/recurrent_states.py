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


#: Steps in which a block's state is looked up once its tokens are scheduled: vLLM
#: caches it a step later or two, or never.
_LOOKS = 4


@dataclass(slots=True)
class _UnderWay:
    """A request that holds its blocks.

    computed_blocks: its full blocks when they were counted last.
    looks: how often these are still looked up.
    states: blocks that we reference.
    """

    request: Request
    computed_blocks: int = 0
    looks: int = 0
    states: list[KVCacheBlock] = field(default_factory=list)


class RecurrentStates:
    """References on the newest cached states of running requests."""

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

    def track(self, request: Request) -> None:
        """The request holds its blocks from now on."""
        self._under_way.setdefault(request.request_id, _UnderWay(request))

    def before_step(self) -> None:
        """Move our references to each running request's newest cached states.

        Others lose theirs: waiting requests must not hold what keeps them waiting.
        """
        for each in self._under_way.values():
            if each.request.status is not RequestStatus.RUNNING:
                self._drop(each)
                continue
            computed_blocks = each.request.num_computed_tokens // self._block_tokens
            if computed_blocks != each.computed_blocks:
                each.computed_blocks, each.looks = computed_blocks, _LOOKS
            if each.looks:
                each.looks -= 1
                found = self.cached_prefix(each.request)
                states = (block for index in self._groups for block in found[index])
                self._hold(each, [block for block in states if not block.is_null])

    def cached_prefix(self, request: Request) -> tuple[list[KVCacheBlock], ...]:
        """The blocks, by cache group, of the request's longest cached prefix."""
        blocks, *_ = self._coordinator.find_longest_cache_hit(
            request.block_hashes, request.num_tokens
        )
        return tuple(list(group) for group in blocks)

    def release(self, request_id: str) -> None:
        """Drop our references for a request that has ended."""
        each = self._under_way.pop(request_id, None)
        if each is not None:
            self._drop(each)

    def drop_all(self) -> None:
        for each in self._under_way.values():
            self._drop(each)

    def _drop(self, each: _UnderWay) -> None:
        """Hold no state of a request until it has computed more."""
        self._hold(each, [])
        each.computed_blocks = 0

    def _hold(self, each: _UnderWay, states: list[KVCacheBlock]) -> None:
        before, each.states = each.states, states
        if not (before or states):
            return  # as mostly: what follows walks over all references
        self._pool.touch(states)
        self.refs.update(block.block_id for block in states)
        self.refs -= Counter(block.block_id for block in before)
        self._pool.free_blocks(before)
