"""What must hold between any two steps, checked against vLLM's own tables.

Run after every step in tests, and in production with `TTLCACHE_CHECK_INVARIANTS=1`.
O(blocks in use + requests).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler

    from ttlcache.controller import Controller
    from ttlcache_connector.blocks.pinned import PinnedBlocks


def violations(
    scheduler: Scheduler, controller: Controller, holder: PinnedBlocks
) -> list[str]:
    """Every broken invariant as one sentence; empty when all hold."""
    return [
        *_tables(controller, holder),
        *_references(scheduler, holder),
        *_requests(scheduler, controller),
    ]


def leaked_blocks(
    scheduler: Scheduler | None, controller: Controller, holder: PinnedBlocks
) -> int:
    """Blocks that no request and no live pin accounts for.

    While requests are under way, those of pins that the pin table has lost: O(pins).
    With the engine at rest all of them: O(blocks that we reference).
    """
    lost = sum(
        len(blocks)
        for pin_id, blocks in holder.blocks_by_pin.items()
        if controller.pins.get(pin_id) is None
    )
    if scheduler is None or scheduler.requests or scheduler.deferred_frees:
        return lost
    pool = holder.pool
    used = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
    return lost + max(0, used - len(holder.references()))


def _tables(controller: Controller, holder: PinnedBlocks) -> Iterator[str]:
    pins = {pin.pin_id: pin.kv_blocks for pin in controller.pins}
    held = {pin_id: len(blocks) for pin_id, blocks in holder.blocks_by_pin.items()}
    if pins != held and not controller.config.observes:
        yield f"pin table {pins} and holder {held} differ"
    if sum(pins.values()) != controller.pins.kv_blocks:
        yield f"pins hold {sum(pins.values())} blocks, the table says otherwise"
    for pin in controller.pins:
        # A request that waits when its program ends may still claim.
        if pin.program.ended and not pin.has_claimant:
            yield f"pin {pin.pin_id} of ended program {pin.program.program_id!r}"


def _references(scheduler: Scheduler, holder: PinnedBlocks) -> Iterator[str]:
    """Each block's count is ours plus vLLM's; free blocks have none."""
    expected = Counter(holder.references())
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    for manager in managers:
        for blocks in manager.req_to_blocks.values():
            expected.update(b.block_id for b in blocks if not b.is_null)
    for _, blocks in scheduler.deferred_frees:
        expected.update(b.block_id for b in blocks if not b.is_null)
    used = 0
    for block in holder.pool.blocks:
        if block.is_null:
            continue
        used += block.ref_cnt > 0
        if block.ref_cnt != expected[block.block_id]:
            yield (
                f"block {block.block_id} has {block.ref_cnt} references, "
                f"expected {expected[block.block_id]}"
            )
    free = holder.pool.get_num_free_blocks()
    if used + free != holder.pool.num_gpu_blocks - 1:  # all but the null block
        yield f"{used} used + {free} free of {holder.pool.num_gpu_blocks} blocks"


def _requests(scheduler: Scheduler, controller: Controller) -> Iterator[str]:
    live = scheduler.requests
    for request_id, record in controller.requests.items():
        if request_id not in live:
            yield f"request {request_id} left the engine but not our table"
        pin = controller.pins.get(record.pin_id)
        if pin is not None and request_id not in pin.claimants:
            yield f"request {request_id} wants pin {pin.pin_id} without holding it"
    for pin in controller.pins:
        for request_id in pin.claimants:
            if request_id not in controller.requests:
                yield f"pin {pin.pin_id} is held by unknown request {request_id}"
    in_flight = Counter(id(r.program) for r in controller.requests.values())
    for program in controller.programs:
        if program.live_requests != in_flight[id(program)]:
            yield f"program {program.program_id!r} counts {program.live_requests} turns"
    for request in scheduler.waiting:
        if request.request_id not in live:
            yield f"request {request.request_id} waits but is unknown to vLLM"
