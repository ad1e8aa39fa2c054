"""Client hints: what a request says about itself, validated, never trusted.

A hint is a wish. A malformed one costs the request its retention and is counted
by reason; it never fails the request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ttlcache.programs.client_values import (
    UNFIT_REASONS,
    UnfitValueError,
    client_flag,
    client_id,
    client_priority,
    client_seconds,
    client_tools,
)
from ttlcache.types import NO_HINTS, Hints

#: Session ids that begin so tell a router where to go, and not whose a request is.
ROUTE_PREFIX = "ttlcache-route-"

#: Every reason under which hints are rejected.
REJECTIONS = ("unknown_key", "not_a_dict", *UNFIT_REASONS)

#: vllm-continuum's names for the same things.
_ALIASES = {"job_id": "program_id", "this_func_call": "tool"}
#: Accepted and ignored: what the previous gap was, the server saw itself.
_IGNORED = frozenset({"last_func_call"})
_FLAT_PREFIX = "ttlcache_"


def parse_hints(
    kv_transfer_params: object, extra_args: Mapping[str, Any] | None = None
) -> Hints:
    """Hints of one request, the first rule of `programs.identity`.

    Args:
        kv_transfer_params: the request's field of that name; our part is the
            dict under its key "ttlcache", and vllm-continuum's flat names.
        extra_args: vLLM's `vllm_xargs`, with keys `ttlcache_program_id` etc.

    Returns:
        Hints; `rejected` is non-empty when anything was malformed, and then no
        hint of this request is used.
    """
    if kv_transfer_params is None and not extra_args:
        return NO_HINTS
    try:
        raw = _collect(kv_transfer_params, extra_args or {})
        fields: dict[str, Any] = {_FIELD[k]: _PARSERS[k](v) for k, v in raw.items()}
        return Hints(**fields)
    except UnfitValueError as unfit:
        return Hints(rejected=(str(unfit),))


def clean_hint(key: str, value: object) -> object:
    """One of a client's hints by its flat name, fit to be sent on as JSON.

    Raises:
        UnfitValueError: it is no value that this hint may have.
    """
    clean = _PARSERS[_ALIASES.get(key, key)](value)
    return list(clean) if isinstance(clean, tuple) else clean


def _collect(params: object, extra: Mapping[str, Any]) -> dict[str, Any]:
    raw: dict[str, Any] = {}
    for key, value in extra.items():
        if isinstance(key, str) and key.startswith(_FLAT_PREFIX):
            _put(raw, key.removeprefix(_FLAT_PREFIX), value)
        elif key in _CONTINUUM_KEYS:
            _put(raw, key, value)
    if isinstance(params, Mapping):
        for key in _CONTINUUM_KEYS & params.keys():
            _put(raw, key, params[key])
        if "ttlcache" in params:
            _collect_own(raw, params["ttlcache"])
    return raw


def _collect_own(raw: dict[str, Any], own: object) -> None:
    if not isinstance(own, Mapping):
        raise UnfitValueError("not_a_dict")
    for key, value in own.items():
        _put(raw, key, value)


def _put(raw: dict[str, Any], key: object, value: Any) -> None:
    name = _ALIASES.get(key, key) if isinstance(key, str) else key
    if name in _IGNORED:
        return
    if not isinstance(name, str) or name not in _PARSERS:
        raise UnfitValueError("unknown_key")
    if value is not None:
        raw[name] = value


_PARSERS: dict[str, Callable[[object], Any]] = {
    "program_id": client_id,
    "parent_id": client_id,
    "is_last_step": client_flag,
    "tool": client_tools,
    "tool_eta_s": client_seconds,
    "ttl": client_seconds,
    "priority_class": client_priority,
}
_FIELD = {name: name for name in _PARSERS} | {"tool": "tools", "ttl": "ttl_s"}
_CONTINUUM_KEYS = frozenset({"job_id", "is_last_step", "this_func_call"}) | _IGNORED
