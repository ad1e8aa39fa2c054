"""Client hints: what a request says about itself, validated, never trusted.

A hint is a wish. A malformed one costs the request its retention and is counted
by reason; it never fails the request.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

#: Longest accepted program id; anything longer is abuse or a mistake.
MAX_ID_CHARS = 256
MAX_TOOL_CHARS = 256
MAX_TOOLS = 32
MAX_PRIORITY_CLASS = 1_000

#: Session ids that begin so tell a router where to go, and not whose a request is.
ROUTE_PREFIX = "ttlcache-route-"

_DURATION = re.compile(r"(\d{1,9}(?:\.\d{1,6})?)(ms|s|m|h)?")
_UNIT_S = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}

#: vllm-continuum's names for the same things.
_ALIASES = {"job_id": "program_id", "this_func_call": "tool"}
#: Accepted and ignored: what the previous gap was, the server saw itself.
_IGNORED = frozenset({"last_func_call"})
_FLAT_PREFIX = "ttlcache_"


@dataclass(frozen=True, slots=True)
class Hints:
    """Validated hints of one request. `rejected` holds reasons of bad ones."""

    program_id: str | None = None
    parent_id: str | None = None
    is_last_step: bool = False
    tools: tuple[str, ...] = ()
    tool_eta_s: float | None = None
    ttl_s: float | None = None
    priority_class: int | None = None
    rejected: tuple[str, ...] = ()


NO_HINTS = Hints()


class _BadHintError(Exception):
    """Carries the reason under which a hint is counted."""


def parse_hints(
    kv_transfer_params: object, extra_args: Mapping[str, Any] | None = None
) -> Hints:
    """Hints of one request (DESIGN §3, rule 1).

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
    except _BadHintError as bad:
        return Hints(rejected=(str(bad),))


def parse_duration_s(value: object) -> float:
    """Seconds from a number or a string such as "5m", "1h", "250ms", "300".

    Raises:
        ValueError: anything else, negative or not finite.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"not a duration: {type(value).__name__}")
    if isinstance(value, str):
        match = _DURATION.fullmatch(value.strip()) if len(value) <= 32 else None
        if match is None:
            raise ValueError("not a duration")
        return float(match[1]) * _UNIT_S[match[2] or "s"]
    try:
        seconds = float(value)
    except OverflowError:
        raise ValueError("not a finite duration") from None
    if not math.isfinite(seconds) or seconds < 0:
        raise ValueError("negative or not finite")
    return seconds


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
        raise _BadHintError("not_a_dict")
    for key, value in own.items():
        _put(raw, key, value)


def _put(raw: dict[str, Any], key: object, value: Any) -> None:
    name = _ALIASES.get(key, key) if isinstance(key, str) else key
    if name in _IGNORED:
        return
    if not isinstance(name, str) or name not in _PARSERS:
        raise _BadHintError("unknown_key")
    if value is not None:
        raw[name] = value


def _parse_id(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        if abs(value) >= 1 << 128:
            raise _BadHintError("id_too_long")
        value = str(value)
    if not isinstance(value, str):
        raise _BadHintError("id_type")
    if not value:
        raise _BadHintError("id_empty")
    if len(value) > MAX_ID_CHARS:
        raise _BadHintError("id_too_long")
    return value


def _parse_bool(value: Any) -> bool:
    # vllm_xargs cannot carry booleans, so 0 and 1 are accepted.
    if isinstance(value, bool) or (isinstance(value, int) and value in (0, 1)):
        return bool(value)
    raise _BadHintError("bool_type")


def _parse_tools(value: Any) -> tuple[str, ...]:
    names = value if isinstance(value, list) else [value]
    if len(names) > MAX_TOOLS:
        raise _BadHintError("too_many_tools")
    for name in names:
        if not isinstance(name, str):
            raise _BadHintError("tool_type")
        if len(name) > MAX_TOOL_CHARS:
            raise _BadHintError("tool_too_long")
    return tuple(name for name in names if name)


def _parse_seconds(value: Any) -> float:
    try:
        return parse_duration_s(value)
    except ValueError:
        raise _BadHintError("duration") from None


def _parse_priority(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise _BadHintError("priority_type")
    if abs(value) > MAX_PRIORITY_CLASS:
        raise _BadHintError("priority_range")
    return value


_PARSERS = {
    "program_id": _parse_id,
    "parent_id": _parse_id,
    "is_last_step": _parse_bool,
    "tool": _parse_tools,
    "tool_eta_s": _parse_seconds,
    "ttl": _parse_seconds,
    "priority_class": _parse_priority,
}
_FIELD = {name: name for name in _PARSERS} | {"tool": "tools", "ttl": "ttl_s"}
_CONTINUUM_KEYS = frozenset({"job_id", "is_last_step", "this_func_call"}) | _IGNORED
