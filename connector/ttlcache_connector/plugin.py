"""Entry point `vllm.general_plugins`: makes `TTLConnector` a name vLLM knows.

It runs in every vLLM process of every user who has this package installed, so it
imports little: it registers the name, and wraps `EngineArgs.create_engine_config`,
which goes on as before for servers that do not name our connector.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Iterator, Sequence
from typing import Any, cast

CONNECTOR = "TTLConnector"
SYNC_SCHEDULER = "ttlcache_connector.scheduler.TTLScheduler"
ASYNC_SCHEDULER = "ttlcache_connector.scheduler.AsyncTTLScheduler"
MIDDLEWARE = "ttlcache_connector.middleware.ProgramIdMiddleware"
_MARK = "_ttlcache_wrapped"


def register() -> None:
    """Idempotent; called by vLLM before any configuration is built."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.engine.arg_utils import EngineArgs

    try:
        KVConnectorFactory.register_connector(
            CONNECTOR, "ttlcache_connector.connector", CONNECTOR
        )
    except ValueError:
        return  # registered before, and EngineArgs with it
    _wrap_engine_config(EngineArgs)


def _wrap_engine_config(engine_args: Any) -> None:
    original = engine_args.create_engine_config

    @functools.wraps(original)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            check(self)
            vllm_config = original(self, *args, **kwargs)
            configure(vllm_config, self)
        except Exception as error:
            _show_in_one_sentence(error)
            raise
        return vllm_config

    engine_args.create_engine_config = create_engine_config


def check(engine_args: Any) -> None:
    """Refuse wrong settings before vLLM looks at the model, which takes many seconds.

    Raises:
        ConfigError: a key, a file it names, or an option of vLLM beside it.
        UnsupportedEngineError: vLLM outside the tested range.
    """
    ours = list(_our_extra_configs(engine_args.kv_transfer_config))
    if not ours:
        return
    from ttlcache.config import load_config, ordering_in_force
    from ttlcache.scheduling import ordering
    from ttlcache_connector import vllm_options
    from ttlcache_connector.engine import requirements
    from ttlcache_connector.role import recording
    from ttlcache_connector.tiers.registry import TIERS

    vllm_options.check_arguments(engine_args, len(ours))
    for extra in ours:
        config = load_config(extra)
        requirements.check_vllm(allow_untested=config.allow_untested_vllm)
        TIERS[config.lower_tier].check(config)
        ordering.create(ordering_in_force(config))
        recording.check(config)


def _show_in_one_sentence(error: Exception) -> None:
    """If an error of ours ends this process, its text is shown and no traceback.

    Whoever calls vLLM as a library catches it like any other.
    """
    from ttlcache.errors import TTLCacheError

    shown = sys.excepthook
    if not isinstance(error, TTLCacheError) or hasattr(shown, _MARK):
        return

    def show(kind: Any, raised: BaseException, trace: Any) -> None:
        if sys.excepthook is show:  # once
            sys.excepthook = shown
        if isinstance(raised, TTLCacheError):
            sys.stderr.write(f"ttlcache: {raised}\n")
        else:
            shown(kind, raised, trace)

    setattr(show, _MARK, True)
    sys.excepthook = show


def configure(vllm_config: Any, engine_args: Any) -> None:
    """Check our settings beside vLLM's and name our scheduler, if ours is used.

    engine_args: what `vllm_config` was made from.

    Raises:
        ConfigError: before any process or weight is loaded.
    """
    for extra in _our_extra_configs(vllm_config.kv_transfer_config):
        _name_tool_parser(extra, sys.argv)
        from ttlcache.config import load_config
        from ttlcache_connector import vllm_options
        from ttlcache_connector.engine import requirements, vllm_internals
        from ttlcache_connector.tiers.cpu.tier import resolve_auto

        extra |= resolve_auto(vllm_config, load_config(extra))
        config = load_config(extra)
        vllm_options.check(vllm_config, config)
        vllm_internals.install_middleware(MIDDLEWARE)
        if config.has_lower_tier:
            # vLLM's default fails the request when a load fails.
            vllm_config.kv_transfer_config.kv_load_failure_policy = "recompute"
        _choose_scheduler(vllm_config.scheduler_config)
        requirements.mark_beside_others(vllm_config)
        vllm_options.put_right(vllm_config, engine_args)
        vllm_options.log_missing(vllm_config, engine_args, config)


def _choose_scheduler(scheduler_config: Any) -> None:
    """Ours where the user named none of his own, asynchronous where vLLM's would be."""
    if scheduler_config.scheduler_cls in (None, SYNC_SCHEDULER, ASYNC_SCHEDULER):
        scheduler_config.scheduler_cls = (
            ASYNC_SCHEDULER if scheduler_config.async_scheduling else SYNC_SCHEDULER
        )


def _name_tool_parser(extra: dict[str, Any], argv: Sequence[str]) -> None:
    """Hand the API server's --tool-call-parser on to the engine process.

    It is an option of the frontend, which the engine's configuration lacks.
    """
    names = "--tool-call-parser", "--tool_call_parser"
    if found := _value_of(_with_config_file(argv), *names):
        extra.setdefault("tool_call_parser", found)


def _with_config_file(argv: Sequence[str]) -> Sequence[str]:
    """The arguments, behind those of the YAML file that `--config` names."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    path = _value_of(argv, "--config")
    if path is None:
        return argv
    try:
        parser: Any = cast(Any, FlexibleArgumentParser)()
        return [*parser.load_config_file(path), *argv]
    except Exception:  # noqa: BLE001 - the option of a script, not of vLLM
        return argv


def _value_of(argv: Sequence[str], *names: str) -> str | None:
    """What the last of these options says, among all kinds of others."""
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    parser.add_argument(*names, dest="value", nargs="?")
    value: str | None = parser.parse_known_args(argv)[0].value
    return value


def _our_extra_configs(transfer_config: Any) -> Iterator[dict[str, Any]]:
    """The extra config of each TTLConnector, direct or inside a MultiConnector."""
    if transfer_config is None:
        return
    if transfer_config.kv_connector_extra_config is None:
        transfer_config.kv_connector_extra_config = {}
    extra = transfer_config.kv_connector_extra_config
    if transfer_config.kv_connector == CONNECTOR:
        yield extra
    elif transfer_config.kv_connector == "MultiConnector":
        for child in extra.get("connectors", ()):
            if isinstance(child, dict) and child.get("kv_connector") == CONNECTOR:
                yield child.setdefault("kv_connector_extra_config", {})
