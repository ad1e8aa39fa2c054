"""The connection to LMCache's servers: how it is configured, and what is told there.

LMCache's own connector with the settings that agents need, hints to its servers'
modules, and the parameters that clients send to it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from typing import Any

from lmcache.integration.vllm.lmcache_mp_connector import LMCacheMPConnector
from lmcache.integration.vllm.lmcache_mp_metadata import LMCacheMPRequestTracker
from lmcache.integration.vllm.vllm_multi_process_adapter import ExtraConfigDefault
from lmcache.v1.multiprocess.transfer_context.worker_transfer import (
    MPTransferMode,
    _resolve_mode,
)
from pydantic import ValidationError
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from ttlcache.errors import ConfigError, nearest
from ttlcache_connector.log import logger
from ttlcache_connector.tiers.base import TurnEnd
from ttlcache_lmcache import internals
from ttlcache_lmcache.client import HintClient
from ttlcache_lmcache.hints import Hint

log = logger(__name__)


PREFIX = "lmcache.mp."
#: LMCache's defaults that do not fit agents; a user's own keys win.
DEFAULTS: dict[str, Any] = {
    "save_decode_cache": True,  # the tool call is generated, and part of the context
    "eager_prefetch": True,  # disk to CPU while the request queues
    "mq_timeout": 2.0,  # seconds that one answer may take, then it is a miss
}
#: A dead server is noticed after about twice as many seconds. Only where our path
#: copies: a server that does, and is slow, would write into what was given to others.
HEARTBEAT_S = 1.5
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
#: A server that refused hints is told again after so long: it may have been started
#: anew, with the module.
RETRY_HINTS_S = 60.0
#: Of the parameters that a client sends to LMCache: how many, and of what length.
MAX_CLIENT_PARAMS = 16
MAX_CHARS = 256
_MAX_INT = 2**63 - 1


def _name_unread(keys: Iterable[str]) -> None:
    """A line for each key that means nothing to LMCache."""
    known = {*READ, *DEFAULTS, *OURS}
    for key in keys:
        name = key.removeprefix(PREFIX)
        if key.startswith("lmcache.") and name not in known:
            near = nearest(name, sorted(known))
            hint = f"; did you mean {PREFIX + near!r}?" if near else ""
            log.warning("ttlcache: LMCache does not read %r%s", key, hint)


def is_by_worker(vllm_config: Any, kv_cache_config: Any) -> bool:
    """Whether our transfer path is to move this model's KV.

    The configuration decides, or LMCache's environment variable.
    """
    groups = kv_cache_config.kv_cache_groups
    if sum(getattr(group, "enable_kv_transfer", True) for group in groups) != 1:
        return False
    extra = vllm_config.kv_transfer_config.kv_connector_extra_config or {}
    mode = _resolve_mode(extra.get(PREFIX + "mp_transfer_mode"))
    return bool(mode is not MPTransferMode.LMCACHE_DRIVEN)


def _inner_config(vllm_config: Any, kv_cache_config: Any) -> Any:
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
    if is_by_worker(vllm_config, kv_cache_config):
        extra.setdefault(PREFIX + "heartbeat_interval", HEARTBEAT_S)
    transfer.kv_connector_extra_config = {**extra, PREFIX + "lazy_offload": True}
    inner = copy.copy(vllm_config)
    inner.kv_transfer_config = transfer
    inner.kv_events_config = None  # nobody asks for what it would collect
    return inner


def connect(role: KVConnectorRole, vllm_config: Any, kv_cache_config: Any) -> Any:
    inner = _inner_config(vllm_config, kv_cache_config)
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
    internals.set_answer_timeout(connector, answer_timeout_s)
    internals.set_reports(connector)
    return connector


class HintSender:
    """Sends turns, their tools and clients' TTLs to every server's retention module.

    Over the clients that LMCache's connector has open. Sending hands over to their own
    thread: it never waits. A server without the module is sent a hint in
    `RETRY_HINTS_S`; the log says so once.
    """

    def __init__(self, adapter: Any, now_s: Callable[[], float]) -> None:
        self._adapter = adapter
        self._now_s = now_s
        self._clients: list[HintClient] = []
        self._renew_s = -math.inf
        self._logged = False

    def report_turn(self, turn: TurnEnd) -> None:
        try:
            hints = [_hint(turn)]
        except ValidationError:
            # A client chose an id that is too long, say. That is no fault of the tier:
            # many faults would turn it off for all.
            return
        now_s = self._now_s()
        if now_s >= self._renew_s:
            self._renew_s = now_s + RETRY_HINTS_S
            servers = self._adapter.req_clients.values()
            self._clients = [HintClient(server, self._now_s) for server in servers]
        for client in self._clients:
            if client.refusal is None:
                client.send(hints)
            elif not self._logged:
                self._logged = True
                log.info(
                    "ttlcache: the LMCache server takes no hints (%s): it keeps KV by "
                    "its own rules; ttlcache serve-tiers --retention loads the module",
                    client.refusal,
                )


def _hint(turn: TurnEnd) -> Hint:
    return Hint(
        request_id=turn.request_id,
        program=turn.program,
        ttl_s=turn.ttl_s if turn.is_final else None,
        is_last_step=turn.ttl_s is None,
        is_over=True,
        tool=turn.tool or None,
    )


def sanitize_request_config(tracker: LMCacheMPRequestTracker) -> None:
    """Keep of a new tracker plain, short values and a bound that is a number.

    LMCache reads `lmcache.*` of a request's `kv_transfer_params` as it is. A bound that
    is no number raises in every step of that request, and what cannot be sent in every
    lookup: one client would turn the tier off for all.
    """
    params = tracker.request_configs
    if params is not None:
        sane = {k: v for k, v in params.items() if _is_sane(k) and _is_sane(v)}
        tracker.request_configs = sane if 0 < len(sane) <= MAX_CLIENT_PARAMS else None
    bound = tracker.max_offload_tokens
    if type(bound) is not int or not _is_sane(bound):
        tracker.max_offload_tokens = None


def _is_sane(value: Any) -> bool:
    if isinstance(value, str):
        return len(value) <= MAX_CHARS and value.isascii()
    if isinstance(value, int):  # a bool, too
        return abs(value) <= _MAX_INT
    return isinstance(value, float) and math.isfinite(value)
