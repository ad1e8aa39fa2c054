"""Client hints: what a request says about itself, validated, never trusted.

A hint is a wish and never fails its request. A malformed value costs the request its
retention, a key that no hint has costs nothing; both are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ttlcache.programs.client_values import (
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

#: Unknown keys of one request that are kept, and characters of each.
MAX_UNKNOWN_KEYS, MAX_KEY_CHARS = 8, 40

#: vllm-continuum's names for the same things.
_ALIASES = {"job_id": "program_id", "this_func_call": "tool"}
#: Accepted and ignored: what the previous gap was, the server saw itself.
_IGNORED = frozenset({"last_func_call"})
_FLAT_PREFIX = "ttlcache_"


def parse_hints(kv_transfer_params: object, extra_args: object = None) -> Hints:
    """Hints of one request, the first rule of `programs.identity`.

    Args:
        kv_transfer_params: the request's field of that name; our part is the
            dict under its key "ttlcache", and vllm-continuum's flat names.
        extra_args: vLLM's `vllm_xargs`, with keys `ttlcache_program_id` etc.

    Returns:
        Hints; `rejected` is non-empty when any value was malformed, and then no
        hint of this request is used.
    """
    if kv_transfer_params is None and not extra_args:
        return NO_HINTS
    raw: dict[str, Any] = {}
    unknown: list[str] = []
    try:
        for key, value in _collect(kv_transfer_params, extra_args):
            text = key if isinstance(key, str) else type(key).__name__
            name = _ALIASES.get(text, text)
            if name in _PARSERS:
                if value is not None:
                    raw[name] = value
            elif name not in _IGNORED and len(unknown) < MAX_UNKNOWN_KEYS:
                unknown.append(name[:MAX_KEY_CHARS])
        fields: dict[str, Any] = {_FIELD[k]: _PARSERS[k](v) for k, v in raw.items()}
        return Hints(**fields, unknown_keys=tuple(unknown))
    except UnfitValueError as unfit:
        return Hints(rejected=(str(unfit),), unknown_keys=tuple(unknown))


def clean_hint(key: str, value: object) -> object:
    """One of a client's hints by its flat name, fit to be sent on as JSON.

    Raises:
        UnfitValueError: it is no value that this hint may have.
    """
    clean = _PARSERS[_ALIASES.get(key, key)](value)
    return list(clean) if isinstance(clean, tuple) else clean


def _collect(params: object, extra: object) -> Iterator[tuple[object, Any]]:
    """Keys and values that are meant for us; the last one of a hint wins."""
    for key, value in extra.items() if isinstance(extra, Mapping) else ():
        if isinstance(key, str) and key.startswith(_FLAT_PREFIX):
            yield key.removeprefix(_FLAT_PREFIX), value
        elif key in _CONTINUUM_KEYS:
            yield key, value
    if isinstance(params, Mapping):
        for key in _CONTINUUM_KEYS & params.keys():
            yield key, params[key]
        if "ttlcache" in params:
            if not isinstance(params["ttlcache"], Mapping):
                raise UnfitValueError("not_a_dict")
            yield from params["ttlcache"].items()


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
#: What a client may write.
HINT_KEYS = (*_PARSERS, *_ALIASES)
