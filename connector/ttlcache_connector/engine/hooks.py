"""What we add to vLLM's own objects, and where it differs between versions."""

from __future__ import annotations

import asyncio
import functools
import importlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from ttlcache_connector.log import logger

#: The module of an API server that adds its middleware (0.30-0.33).
_APP_MODULE = "vllm.entrypoints.launchers.app"
_ADD_MIDDLEWARE = "init_entrypoints_middleware"
#: An engine that has not answered by then is taken for dead.
ASK_TIMEOUT_S = 10.0
_CONTROL = "ttlcache_control"
_CHOOSES_RANK = "_ttlcache_chooses_rank"


def may_sleep(extra_config: Mapping[str, Any] | None) -> bool:
    """Whether `--enable-sleep-mode` goes with it; vLLM asks since 0.33.

    Not where it says that LMCache's server maps the workers' KV cache, which would go
    on with that memory after a sleep, in which vLLM gives it back. Where that turns
    out later, the worker refuses.
    """
    extra = extra_config or {}
    if extra.get("lower_tier", "none") == "none":
        return True
    mode = extra.get("lmcache.mp.mp_transfer_mode")
    if mode is None:
        mode = os.environ.get("LMCACHE_MP_TRANSFER_MODE")
    by_server = str(mode).lower() == "lmcache_driven"
    return not by_server and not extra.get("lmcache.mp.use_vmm_api")


def can_install_middleware() -> bool:
    """Whether `install_middleware` knows this vLLM's API server."""
    return hasattr(importlib.import_module(_APP_MODULE), _ADD_MIDDLEWARE)


def install_middleware(path: str) -> None:
    """Have this process's API server load the ASGI middleware at `path`.

    It goes through vLLM's own `--middleware` list, and only where an API server is
    being built: elsewhere nothing is imported and nothing happens.
    """
    app_module = sys.modules.get(_APP_MODULE)
    if app_module is None:
        if "vllm.entrypoints.openai.api_server" in sys.modules:
            logger(__name__).warning(
                "ttlcache: cannot add its middleware to this vLLM; agents' own "
                "session headers are seen with --middleware %s",
                path,
            )
        return
    original = getattr(app_module, _ADD_MIDDLEWARE, None)
    if original is None or hasattr(original, "__wrapped__"):
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
    if hasattr(core, "call_utility_all_async"):  # since 0.32
        call = core.call_utility_all_async(_CONTROL, text)
    else:
        call = core.call_utility_async(_CONTROL, text)
    answers = await asyncio.wait_for(call, ASK_TIMEOUT_S)
    if isinstance(answers, str):
        answers = [answers]
    return [json.loads(answer) for answer in answers]


def count_ranks(client: Any) -> int:
    """Data-parallel ranks that requests of an `AsyncLLM` may name."""
    parallel = client.vllm_config.parallel_config
    local = parallel.local_engines_only
    return int(
        parallel.data_parallel_size_local if local else parallel.data_parallel_size
    )


def choose_rank(client: Any, rank: Callable[[], int | None]) -> None:
    """Have an `AsyncLLM` ask `rank` for requests whose caller names no rank."""
    original = client.generate
    if getattr(original, _CHOOSES_RANK, False):
        return

    @functools.wraps(original)
    def generate(*args: Any, **named: Any) -> Any:
        if named.get("data_parallel_rank") is None:
            named["data_parallel_rank"] = rank()
        return original(*args, **named)

    setattr(generate, _CHOOSES_RANK, True)
    client.generate = generate


def transfer_results(transfers: Any) -> Any:
    """Our `Transfers` as the type that vLLM 0.32 asks for."""
    base = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.v1.base")
    return base.KVConnectorTransferResults(
        finished_recving=transfers.received, failed_recving=transfers.failed
    )
