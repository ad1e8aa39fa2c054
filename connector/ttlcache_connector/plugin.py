"""Entry point `vllm.general_plugins`: makes `TTLConnector` a name vLLM knows.

It runs in every vLLM process of every user who has this package installed, so
it does nothing but register, and nothing at all happens to servers that do not
name our connector.
"""

from __future__ import annotations

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
    if getattr(original, _MARK, False):
        return

    @functools.wraps(original)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        if ours := list(_our_extra_configs(self.kv_transfer_config)):
            from ttlcache_connector import vllm_options

            vllm_options.check_arguments(self, len(ours))
        vllm_config = original(self, *args, **kwargs)
        configure(vllm_config, self)
        return vllm_config

    setattr(create_engine_config, _MARK, True)
    engine_args.create_engine_config = create_engine_config


def configure(vllm_config: Any, engine_args: Any) -> None:
    """Check our settings early and name our scheduler, if our connector is used.

    engine_args: what `vllm_config` was made from.

    Raises:
        ConfigError: before any process or weight is loaded.
        UnsupportedEngineError: vLLM outside the tested range.
    """
    for extra in _our_extra_configs(vllm_config.kv_transfer_config):
        _name_tool_parser(extra, sys.argv)
        from ttlcache.config import load_config
        from ttlcache_connector import vllm_options
        from ttlcache_connector.engine import hooks, requirements
        from ttlcache_connector.tiers import factory

        config = load_config(extra)
        requirements.check_vllm(allow_untested=config.allow_untested_vllm)
        vllm_options.check(vllm_config, config)
        hooks.install_middleware(MIDDLEWARE)
        factory.check(config)
        if config.lower_tier != "none":
            # vLLM's default fails the request when a load fails.
            vllm_config.kv_transfer_config.kv_load_failure_policy = "recompute"
        _choose_scheduler(vllm_config.scheduler_config)
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
    argv, found = _with_config_file(argv), ""
    for index, argument in enumerate(argv):
        name, equals, value = argument.partition("=")
        if name not in ("--tool-call-parser", "--tool_call_parser"):
            continue
        if not equals and index + 1 < len(argv):
            value = argv[index + 1]
        if value:
            found = value
    if found:
        extra.setdefault("tool_call_parser", found)


def _with_config_file(argv: Sequence[str]) -> Sequence[str]:
    """The arguments, behind those of the YAML file that `--config` names."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    for index, argument in enumerate(argv):
        name, equals, path = argument.partition("=")
        if name == "--config":
            path = path if equals else "".join(argv[index + 1 : index + 2])
            try:
                parser: Any = cast(Any, FlexibleArgumentParser)()
                return [*parser.load_config_file(path), *argv]
            except Exception:  # noqa: BLE001 - the option of a script, not of vLLM
                return argv
    return argv


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
