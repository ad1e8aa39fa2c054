"""LMCache's connector with the settings that agents need."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Iterable
from typing import Any

from lmcache.integration.vllm.lmcache_mp_connector import LMCacheMPConnector
from lmcache.integration.vllm.vllm_multi_process_adapter import ExtraConfigDefault
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from ttlcache.errors import ConfigError
from ttlcache_connector.log import logger

log = logger(__name__)

PREFIX = "lmcache.mp."
#: LMCache's defaults that do not fit agents; a user's own keys win.
DEFAULTS: dict[str, Any] = {
    "save_decode_cache": True,  # the tool call is generated, and part of the context
    "eager_prefetch": True,  # disk to CPU while the request queues
    "mq_timeout": 2.0,  # seconds that one answer may take, then it is a miss
    "heartbeat_interval": 1.5,  # seconds until a dead server is noticed, about twice
}
#: The first answer of a server may take longer: it may be starting.
CONNECT_TIMEOUT_S = 15.0
#: Keys that our own settings decide.
OURS = {"lazy_offload": "demote", "lazy_offload_policy": "demote"}
#: What LMCache 0.5.6 reads besides; what it does not know it passes over in silence.
READ = frozenset(
    {
        *(item.name for item in ExtraConfigDefault),
        *("host", "port", "server_urls", "transfer_intermediate_tensors"),
        *("autostart", "autostart.server_args", "autostart.wait_timeout"),
        *("lazy_offload_horizon_steps", "lazy_offload_max_drain_per_step"),
        "lazy_offload_max_deferral_seconds",
    }
)


def _name_unread(keys: Iterable[str]) -> None:
    """A line for each key that means nothing to LMCache."""
    known = {*READ, *DEFAULTS, *OURS}
    for key in keys:
        name = key.removeprefix(PREFIX)
        if key.startswith("lmcache.") and name not in known:
            near = difflib.get_close_matches(name, sorted(known), n=1)
            hint = f"; did you mean {PREFIX + near[0]!r}?" if near else ""
            log.warning("ttlcache: LMCache does not read %r%s", key, hint)


def _inner_config(vllm_config: Any) -> Any:
    """vLLM's configuration as LMCache's connector is to see it."""
    transfer = copy.copy(vllm_config.kv_transfer_config)
    extra = dict(transfer.kv_connector_extra_config or {})
    _name_unread(extra)
    for key, ours in OURS.items():
        if PREFIX + key in extra:
            raise ConfigError(
                f"kv_connector_extra_config: key {PREFIX + key!r} has value "
                f"{extra[PREFIX + key]!r}, expected: none, because {ours!r} decides it"
            )
    for key, value in DEFAULTS.items():
        extra.setdefault(PREFIX + key, value)
    transfer.kv_connector_extra_config = {**extra, PREFIX + "lazy_offload": True}
    inner = copy.copy(vllm_config)
    inner.kv_transfer_config = transfer
    return inner


def connect(role: KVConnectorRole, vllm_config: Any, kv_cache_config: Any) -> Any:
    inner = _inner_config(vllm_config)
    extra = inner.kv_transfer_config.kv_connector_extra_config
    answer_timeout_s = float(extra[PREFIX + "mq_timeout"])
    extra[PREFIX + "mq_timeout"] = max(answer_timeout_s, CONNECT_TIMEOUT_S)
    try:
        connector = LMCacheMPConnector(inner, role, kv_cache_config)
    except (ConnectionError, TimeoutError):
        host = extra.get(PREFIX + "host", "tcp://localhost")
        port = extra.get(PREFIX + "port", 5555)
        raise ConfigError(
            "kv_connector_extra_config: lower_tier 'lmcache' needs a running LMCache "
            f"server, and none answers at {host}:{port}; start it first: "
            "ttlcache serve-tiers"
        ) from None
    for adapter in ("scheduler_adapter", "worker_adapter"):
        if hasattr(connector, adapter):
            getattr(connector, adapter)._mq_timeout = answer_timeout_s  # noqa: SLF001
    return connector
