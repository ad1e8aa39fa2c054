"""What we add to vLLM's own objects, its private names, and where versions differ."""

from __future__ import annotations

import asyncio
import functools
import json
import math
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from prometheus_client import REGISTRY

from ttlcache_connector.log import logger

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.scheduler import Scheduler

#: The module of an API server that adds its middleware (0.32, 0.33).
_APP_MODULE = "vllm.entrypoints.launchers.app"
_ADD_MIDDLEWARE = "init_entrypoints_middleware"
#: An engine that has not answered by then is taken for dead.
ASK_TIMEOUT_S = 10.0
_CONTROL = "ttlcache_control"


def install_middleware(path: str) -> None:
    """Have this process's API server load the ASGI middleware at `path`.

    It goes through vLLM's own `--middleware` list, and only where an API server is
    being built: elsewhere nothing is imported and nothing happens.
    """
    app_module = sys.modules.get(_APP_MODULE)
    original = getattr(app_module, _ADD_MIDDLEWARE, None)
    if original is None:
        if "vllm.entrypoints.openai.api_server" in sys.modules:
            logger(__name__).warning(
                "ttlcache: cannot add --middleware %s to this vLLM", path
            )
        return
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def add_middleware(args: Any, *rest: Any, **named: Any) -> Any:
        if path not in args.middleware:
            args.middleware = [*args.middleware, path]
        return original(args, *rest, **named)

    setattr(app_module, _ADD_MIDDLEWARE, add_middleware)


def expose_control(handle: Callable[[Any, dict[str, Any]], dict[str, Any]]) -> None:
    """Give the engine process's core a method that the API server can call.

    vLLM's utility calls look a method up by name on its EngineCore and run it between
    two steps, in the thread that steps.

    Args:
        handle: scheduler and order to answer.
    """
    from vllm.v1.engine.core import EngineCore

    def control(core: Any, order: str) -> str:
        return json.dumps(handle(core.scheduler, json.loads(order)))

    setattr(EngineCore, _CONTROL, control)


async def ask_engines(client: Any, order: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Send an order to every engine of an `AsyncLLM`; their answers.

    Raises:
        Exception: whatever vLLM raises for an engine that is dead or too old.
    """
    core, text = client.engine_core, json.dumps(dict(order))
    call = core.call_utility_all_async(_CONTROL, text)
    answers = await asyncio.wait_for(call, ASK_TIMEOUT_S)
    return [json.loads(answer) for answer in answers]


def is_first_api_server(vllm_config: Any) -> bool:
    """Of several API servers for one engine, this process's is the first."""
    return int(vllm_config.parallel_config._api_process_rank) <= 0  # noqa: SLF001


def forget_metrics(names: Collection[str]) -> None:
    """Take metrics out of this process's registry, as vLLM does with its own.

    It makes its loggers anew when data-parallel ranks are added (`/scale_elastic_ep`),
    and for a second engine in one process.
    """
    for collector in list(REGISTRY._collector_to_names):  # noqa: SLF001
        if getattr(collector, "_name", None) in names:
            REGISTRY.unregister(collector)


def put_back_failed_loads(scheduler: Scheduler) -> None:
    """Requests that lost all their blocks wait like any other, and reserve nothing.

    vLLM frees the blocks of a request whose load failed, if nothing of them is good,
    but leaves it among those that hold blocks, before the whole waiting queue, and goes
    on reserving for it what it held. If it does not fit then, nobody behind it is
    looked at, not even those who hold the memory: the engine may stand still.
    """
    under_way = scheduler._inflight_prefills  # noqa: SLF001 - nothing public tells
    if not under_way:
        return
    from vllm.v1.request import RequestStatus

    groups = scheduler.kv_cache_manager.coordinator.single_type_managers
    lost = [
        request
        for request in under_way
        if request.status is not RequestStatus.RUNNING
        and not any(group.req_to_blocks.get(request.request_id) for group in groups)
    ]
    # A set has no order of its own: the same history gives the same queue.
    for request in sorted(lost, key=lambda r: (r.arrival_time, r.request_id)):
        # First in, then out: whatever happens, it is in some queue.
        scheduler.waiting.add_request(request)
        scheduler.kv_holding_waiting.remove_requests((request,))
        under_way.discard(request)


def coordinator_like(manager: Any, vllm_config: Any, num_blocks: int) -> Any:
    """A KV cache coordinator as `manager` has it, over a pool of its own.

    For other memory that holds the same kinds of blocks: vLLM's own rules say what is
    a hit.
    """
    from vllm.v1.core.kv_cache_coordinator import get_kv_cache_coordinator

    parallel = vllm_config.parallel_config
    sizes = [m.block_size for m in manager.coordinator.single_type_managers]
    return get_kv_cache_coordinator(
        kv_cache_config=replace(manager.kv_cache_config, num_blocks=num_blocks),
        max_model_len=manager.max_model_len,
        max_in_flight_tokens=vllm_config.max_in_flight_tokens,
        use_eagle=manager.use_eagle,
        enable_caching=True,
        enable_kv_cache_events=False,
        dcp_world_size=parallel.decode_context_parallel_size,
        pcp_world_size=parallel.prefill_context_parallel_size,
        scheduler_block_size=math.lcm(*sizes),
        hash_block_size=manager.block_pool.hash_block_size,
        num_prefill_lookahead=vllm_config.num_prefill_lookahead_tokens,
        allow_partial_hash_hits=False,
    )


#: A block's hashes, the one it is stored under first, and the tokens behind that one.
BlockHashes = tuple[tuple[Any, ...], int | None]


def hashes_of(pool: BlockPool, block: KVCacheBlock) -> BlockHashes:
    """Under which hashes a cached block can be found."""
    others = pool.cached_block_hashes_by_block.get(block.block_id, ())
    return (block.block_hash, *others), block.block_hash_num_tokens


def set_hashes(pool: BlockPool, block: KVCacheBlock, hashes: BlockHashes) -> None:
    """A block of another pool holds the same: it can be found there from now on."""
    names, tokens = hashes
    for place, name in enumerate(names):
        pool._insert_block_hash(  # noqa: SLF001
            name, block, num_tokens=None if place else tokens
        )


def cached_block(pool: BlockPool, block_hash: Any) -> KVCacheBlock | None:
    """The block of a pool that holds what this hash, with its group, stands for."""
    return pool.cached_block_hash_to_block.get_one_block(block_hash)
