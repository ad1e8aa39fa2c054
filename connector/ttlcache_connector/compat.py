"""All knowledge about vLLM versions, in one file."""

from __future__ import annotations

import asyncio
import functools
import importlib
import importlib.metadata
import json
import logging
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from ttlcache.errors import ConfigError, UnsupportedEngineError

#: First tested version, and the first one beyond the tested range.
TESTED_FROM = (0, 30)
TESTED_BELOW = (0, 34)
#: The module of an API server that adds its middleware (0.30-0.33).
_APP_MODULE = "vllm.entrypoints.launchers.app"
_ADD_MIDDLEWARE = "init_entrypoints_middleware"
#: An engine that has not answered by then is taken for dead.
ASK_TIMEOUT_S = 10.0
_CONTROL = "ttlcache_control"
_CHOOSES_RANK = "_ttlcache_chooses_rank"


def logger(name: str) -> logging.Logger:
    """A logger that shows: vLLM attaches its handler to the `vllm` logger only."""
    return logging.getLogger(f"vllm.{name}")


def vllm_version() -> str:
    """The version of the vllm module at hand, whatever its distribution is called."""
    return str(importlib.import_module("vllm").__version__)


def ttlcache_version() -> str:
    try:
        return importlib.metadata.version("ttlcache")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def check_vllm(*, allow_untested: bool) -> str:
    """Refuse vLLM versions that no test of ours has seen.

    Returns:
        The version.

    Raises:
        UnsupportedEngineError: outside the tested range and not overridden.
    """
    version = vllm_version()
    numbers = _numbers(version)[:2]
    if TESTED_FROM <= numbers < TESTED_BELOW:
        return version
    tested = tested_range()
    if not allow_untested:
        raise UnsupportedEngineError(
            f"vLLM {version} is outside the range that ttlcache "
            f"{ttlcache_version()} was tested with ({tested}); set "
            '"allow_untested_vllm": true in kv_connector_extra_config to try it'
        )
    logger(__name__).warning(
        "ttlcache runs on untested vLLM %s (tested: %s)", version, tested
    )
    return version


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


def tested_range() -> str:
    """The versions of vLLM that our tests run on."""
    return f">={_dotted(TESTED_FROM)},<{_dotted(TESTED_BELOW)}"


def recurrent_cache_modes() -> tuple[str, ...]:
    """How vLLM may cache states of recurrent layers beside a prefix cache."""
    if _numbers(vllm_version())[:2] >= (0, 33):
        return ("align",)
    return ("none", "align", "all")


def can_install_middleware() -> bool:
    """Whether `install_middleware` knows this vLLM's API server."""
    return hasattr(importlib.import_module(_APP_MODULE), _ADD_MIDDLEWARE)


#: LMCache versions whose insides `lower_lmcache` was tested with, and vLLM's.
LMCACHE_FROM = (0, 5, 6)
LMCACHE_BELOW = (0, 6)
LMCACHE_NEEDS_VLLM = (0, 32)
#: RPC of `lmcache_module`: request id as JSON -> {"cpu": tokens, "disk": tokens}.
LOOKUP_TIERS = "ttlcache.lookup_tiers"
#: Another one: nothing -> {"cpu_bytes": of the server's memory} if a lookup's key may
#: begin within a context, else null.
LOOKUPS_BEGIN_ANYWHERE = "ttlcache.lookups_begin_anywhere"


def check_lower_tier(lower_tier: str, *, allow_untested: bool) -> None:
    """Refuse a lower tier that is not there or was not tested.

    Raises:
        ConfigError: LMCache is not installed.
        UnsupportedEngineError: the pair of versions was not tested.
    """
    if lower_tier == "none":
        return
    try:
        lmcache = importlib.metadata.version("lmcache")
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(
            "key 'lower_tier' has value 'lmcache', expected: 'none' where LMCache is "
            "not installed; install vllm and lmcache>=0.5.6 in one pip command"
        ) from None
    vllm = vllm_version()
    good = LMCACHE_FROM <= _numbers(lmcache) < LMCACHE_BELOW
    if good and _numbers(vllm)[:2] >= LMCACHE_NEEDS_VLLM:
        return
    tested = (
        f"LMCache >={_dotted(LMCACHE_FROM)},<{_dotted(LMCACHE_BELOW)} with vLLM "
        f">={_dotted(LMCACHE_NEEDS_VLLM)}"
    )
    if not allow_untested:
        raise UnsupportedEngineError(
            f"LMCache {lmcache} with vLLM {vllm} is outside of what ttlcache "
            f"{ttlcache_version()} was tested with ({tested}); set "
            '"allow_untested_vllm": true in kv_connector_extra_config to try it'
        )
    logger(__name__).warning(
        "ttlcache runs on untested LMCache %s with vLLM %s (tested: %s)",
        lmcache,
        vllm,
        tested,
    )


def check_engine(vllm_config: Any) -> None:
    """Refuse engine settings under which retention cannot work.

    Raises:
        ConfigError: prefix caching is off.
    """
    if not vllm_config.cache_config.enable_prefix_caching:
        raise ConfigError(
            "TTLConnector needs prefix caching: a retained turn is found again "
            "through it; remove --no-enable-prefix-caching, or add "
            "--enable-prefix-caching if it was vLLM that left it off for this model "
            "(value of enable_prefix_caching: False, expected: True)"
        )


def check_combination(vllm_config: Any, admission: str) -> None:
    """Refuse settings that would let a held-back newcomer block the others.

    Raises:
        ConfigError: admission control together with client priorities.
    """
    if (
        admission not in ("auto", "none")
        and vllm_config.scheduler_config.policy == "priority"
    ):
        raise ConfigError(
            f"key 'admission' has value {admission!r}, expected: 'auto' or 'none' with "
            "--scheduling-policy priority (a newcomer of high priority that is held "
            "back would stand before programs under way)"
        )


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


def expose_control() -> None:
    """Give the engine process's core a method that the API server can call.

    vLLM's utility calls look a method up by name on its EngineCore and run it between
    two steps, in the thread that steps.
    """
    from vllm.v1.engine.core import EngineCore

    setattr(EngineCore, _CONTROL, _control)


def _control(core: Any, order: str) -> str:
    from ttlcache_connector.connector import find_connector

    connector = find_connector(core.scheduler.connector)
    if connector is None:
        return "{}"
    return json.dumps(connector.control(json.loads(order)))


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


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(p) for p in version.split(".")[:3] if p.isdigit())


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(str(n) for n in numbers)
