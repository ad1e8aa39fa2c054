"""`KVCacheManager.allocate_slots`, wrapped: where it gives None the connector's
`eviction` callback (`role.scheduling`) makes pins give way.

The bound KV cache manager's method is wrapped, not vLLM's class: it covers
running and waiting requests, our scheduler and foreign ones.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.request import RequestStatus

from ttlcache.types import Urgency
from ttlcache_connector.faults import guarded

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request

    from ttlcache_connector.connector import TTLConnector
    from ttlcache_connector.role.engine_link import EngineLink, Prefills
    from ttlcache_connector.role.teardown import Teardown

#: Blocks of a group that a call may want unseen by our estimate: states of speculative
#: tokens, checkpoints, copies of shared tails.
UNSEEN_BLOCKS = 16


class Group(NamedTuple):
    """A KV cache group as its manager allocates.

    block_tokens: more than the spec's where ranks of decode context parallelism share.
    most_blocks: that one request holds at a time: a window gives back what it leaves,
        and so does a recurrent state.
    is_window: vLLM's own admission limits it by that.
    """

    block_tokens: int
    most_blocks: float
    is_window: bool

    def blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)


def groups_of(manager: KVCacheManager) -> list[Group]:
    found = []
    for each in manager.coordinator.single_type_managers:
        window, spec = each.max_admission_blocks_per_request, each.kv_cache_spec
        most_blocks = window or math.inf
        if isinstance(spec, MambaSpec) and spec.mamba_cache_mode == "align":
            # As many as vLLM reckons with when it sizes the pool.
            most_blocks = 2 + spec.num_speculative_blocks
            most_blocks += spec.num_prefill_checkpoint_blocks
        found.append(Group(each.block_size, most_blocks, bool(window)))
    return found


class AllocationGuard:
    """Retries failed allocations after pins gave way."""

    def __init__(
        self,
        manager: KVCacheManager,
        connector: TTLConnector,
        engine: EngineLink,
        prefills: Prefills,
        teardown: Teardown,
    ) -> None:
        self._manager = manager
        self._connector = connector
        self._engine, self._prefills = engine, prefills
        self._teardown, self.faults = teardown, teardown.faults
        self._allocate: Callable[..., Any] = manager.allocate_slots
        self._reset: Callable[[], bool] = manager.reset_prefix_cache
        self._groups = groups_of(manager)
        self._windows = [i for i, group in enumerate(self._groups) if group.is_window]

    def install(self) -> None:
        """Shadow two methods of this one manager object."""
        manager: Any = self._manager
        manager.allocate_slots = self._fast_path_for_running()
        manager.reset_prefix_cache = self.reset_prefix_cache

    def allocate_slots(
        self, request: Request, num_new_tokens: int, *args: Any, **kwargs: Any
    ) -> Any:
        """`KVCacheManager.allocate_slots`, with pins that give way."""
        if kwargs.get("delay_cache_blocks") and "reserved_blocks" in kwargs:
            kwargs["reserved_blocks"] += self.window_reserve_gap_blocks()
        blocks = self._allocate(request, num_new_tokens, *args, **kwargs)
        if blocks is not None:
            return blocks
        urgency, needed = self.urgency(request, kwargs), 0
        while True:
            missing = self.missing_blocks(request, num_new_tokens, kwargs)
            if self._failed_not_for_memory(missing, urgency):
                return None
            needed = max(2 * needed, missing, 1)
            if not self._connector.eviction(needed, request, urgency):
                return None
            blocks = self._allocate(request, num_new_tokens, *args, **kwargs)
            if blocks is not None:
                return blocks

    def reset_prefix_cache(self) -> bool:
        """vLLM refuses to reset while any block is referenced: pins go first."""
        self._teardown.release_all()  # guarded there
        return self._reset() and self._teardown.clear_own_tier()

    def _fast_path_for_running(self) -> Callable[..., Any]:
        """`allocate_slots` that first tries what every running request needs.

        Called for each of them at every step, so it is a function that spells out
        the arguments of that call: to hand on whatever comes costs four times as much.
        """
        allocate, long_way = self._allocate, self.allocate_slots
        running = RequestStatus.RUNNING

        def allocate_slots(
            request: Request,
            num_new_tokens: int,
            *args: Any,
            num_lookahead_tokens: int = 0,
            **kwargs: Any,
        ) -> Any:
            if request.status is running and not (args or kwargs):
                blocks = allocate(
                    request, num_new_tokens, num_lookahead_tokens=num_lookahead_tokens
                )
                if blocks is not None:
                    return blocks
            if len(args) < 3:  # it is not among these
                kwargs["num_lookahead_tokens"] = num_lookahead_tokens
            return long_way(request, num_new_tokens, *args, **kwargs)

        return allocate_slots

    @guarded(fallback=Urgency.STALLED)  # the one that cannot wedge
    def urgency(self, request: Request, kwargs: dict[str, Any]) -> Urgency:
        """How badly a call needs its blocks."""
        if request.status is RequestStatus.RUNNING:
            return Urgency.RUNNING
        running = self._engine.num_running()
        if running is None:  # a foreign scheduler: vLLM tells, or we assume the worst
            running = int(kwargs.get("has_scheduled_reqs", False))
        # What waits for remote KV holds its blocks and will run and free them: only
        # without that does the engine stand still.
        if running == 0 and not self._prefills.is_loading():
            return Urgency.STALLED
        # A request that holds blocks, or is overdue, may take any pin but its own; any
        # request may where the queue is not in the order of pins' ranks.
        takes_any_pin = request.num_computed_tokens or self._engine.is_overdue(request)
        if takes_any_pin or not self._engine.queue_follows_pin_ranks:
            return Urgency.WAITING_ANY_PIN
        return Urgency.WAITING

    @guarded(fallback=0)
    def window_reserve_gap_blocks(self) -> int:
        """Blocks that vLLM fails to keep free for prefills under way.

        It subtracts a request's whole block table from the most blocks that a window
        holds, with the null blocks of what the window has left. Two loads could then
        both lack blocks, and wait for each other.
        """
        missing = 0
        for request in self._prefills if self._windows else ():
            held = self._manager.get_blocks(request.request_id).blocks
            for index in self._windows:
                group, blocks = self._groups[index], held[index]
                nulls = bisect_left(blocks, True, key=lambda b: not b.is_null)
                ahead = group.blocks(request.num_tokens) - len(blocks)
                spare = int(group.most_blocks) - len(blocks)
                missing += max(0, min(ahead, spare + nulls)) - max(0, min(ahead, spare))
        return missing

    def _failed_not_for_memory(self, missing: int, urgency: Urgency) -> bool:
        """Whether the call failed for another reason than memory.

        vLLM refuses what hits a recurrent state that is computed only in this step:
        no pin would help. Running requests and a stalled engine get the benefit of
        the doubt.
        """
        if urgency in (Urgency.RUNNING, Urgency.STALLED):
            return False
        return missing <= -UNSEEN_BLOCKS * len(self._groups)

    @guarded(fallback=1)
    def missing_blocks(
        self, request: Request, num_new_tokens: int, kwargs: dict[str, Any]
    ) -> int:
        """How many free blocks the failed call lacked, roughly; below 0: had to spare.

        Exact only for one full-attention group; the caller doubles it until the
        call succeeds or nothing is left to take.
        """
        hit_tokens = kwargs.get("num_new_computed_tokens", 0)
        tokens = request.num_computed_tokens + hit_tokens + num_new_tokens
        tokens += kwargs.get("num_lookahead_tokens", 0)
        tokens += kwargs.get("num_external_computed_tokens", 0)
        whole = request.num_tokens if kwargs.get("full_sequence_must_fit") else 0
        owned = self._manager.get_block_ids(request.request_id)
        required = 0.0
        for group, ids in zip(self._groups, owned, strict=True):
            most = group.most_blocks
            wanted = max(group.blocks(tokens), min(group.blocks(whole), most))
            lacking = wanted - hit_tokens // group.block_tokens - len(ids)
            required += min(max(0, lacking), most)
        hits = kwargs.get("new_computed_blocks")
        if hits is not None:  # those that nobody references are taken from the free
            found = (block for group in hits.blocks for block in group)
            # What a window has left is vLLM's null block, which nobody takes.
            required += sum(not b.ref_cnt and not b.is_null for b in found)
        required += kwargs.get("reserved_blocks", 0)
        if request.status is not RequestStatus.RUNNING and kwargs.get(
            "has_scheduled_reqs", True
        ):
            required += self._manager.watermark_blocks
        free = self._manager.block_pool.get_num_free_blocks()
        return int(required - free)
