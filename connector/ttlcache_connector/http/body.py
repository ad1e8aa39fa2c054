"""A request's body: the few members that are looked at, without building the others."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import msgspec

from ttlcache.programs.client_values import (
    MAX_NESTED_SIZE,
    UnfitValueError,
    client_seconds,
)
from ttlcache_connector.http.known_clients import CONTINUUM_FIELDS

#: What decoding may raise on a client's bytes.
UNREADABLE = (msgspec.MsgspecError, RecursionError, ValueError, OverflowError)
#: Messages among which the first user message is looked for.
MAX_OPENING = 16
#: Longer JSON text inside a member is not read.
MAX_TEXT_CHARS = 16 * 1024
#: Of a member that is read: all that may go on, as long numbers or escaped characters.
MAX_MEMBER_BYTES = 12 * MAX_NESTED_SIZE
_CACHE_CONTROL = re.compile(rb'"cache_control"\s*:\s*(\{[^{}]*\})')
#: Blanks are counted: a long run must not be looked at from each of its blanks.
_CACHE_CONTROL_FIELD = re.compile(
    rb'(?:,\s{0,99})?"cache_control"\s*:\s*(?:\{[^{}]*\}|null)'
)


class Body(msgspec.Struct):
    """The fields that we look at."""

    metadata: Any = None
    session_id: Any = None
    job_id: Any = None
    is_last_step: Any = None
    this_func_call: Any = None
    agent_hint: Any = None
    nvext: Any = None
    kv_transfer_params: Any = None
    vllm_xargs: Any = None
    previous_response_id: Any = None
    system: msgspec.Raw = msgspec.Raw(b"")
    instructions: msgspec.Raw = msgspec.Raw(b"")
    messages: msgspec.Raw = msgspec.Raw(b"")
    input: msgspec.Raw = msgspec.Raw(b"")
    prompt: msgspec.Raw = msgspec.Raw(b"")
    unread: tuple[str, ...] = ()
    """Members of which not all is read, for its length."""


class _Role(msgspec.Struct):
    role: Any = None


_RAW = frozenset({"system", "instructions", "messages", "input", "prompt"})
_VALUES = tuple(
    name for name in Body.__struct_fields__ if name not in {*_RAW, "unread"}
)
#: The members as bytes: to build objects of many megabytes takes seconds. All others
#: are skipped.
_MEMBERS = msgspec.json.Decoder(
    msgspec.defstruct(
        "_Members",
        [(name, msgspec.Raw, msgspec.Raw(b"")) for name in (*_VALUES, *_RAW)],
    )
)
_VALUE = msgspec.json.Decoder()
_ENTRIES = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ITEMS = msgspec.json.Decoder(list[msgspec.Raw])
_ROLE = msgspec.json.Decoder(_Role)
#: A body without any of these bytes has nothing for us and is not parsed.
_TELLING = (
    *("metadata", "session_id", "cache_control", "kv_transfer_params", "vllm_xargs"),
    *("agent_hint", "nvext", *CONTINUUM_FIELDS),
)
_MARKERS = re.compile(rb'"(?:%s)"\s*:' % "|".join(_TELLING).encode())


def tells_something(body: bytes) -> bool:
    """Whether any member may be there that is looked at."""
    return _MARKERS.search(body) is not None


def parse(body: bytes) -> Body | None:
    """The fields that we look at, None where the body is no JSON object."""
    try:
        found = msgspec.structs.asdict(_MEMBERS.decode(body))
        told = {name: bytes(found.pop(name)) for name in _VALUES}
        read = {
            name: _VALUE.decode(raw)
            for name, raw in told.items()
            if 0 < len(raw) <= MAX_MEMBER_BYTES
        }
        unread = tuple(name for name, raw in told.items() if raw and name not in read)
        if "kv_transfer_params" in unread:
            read["kv_transfer_params"] = _short_entries(told["kv_transfer_params"])
        return Body(**read, **found, unread=unread)
    except UNREADABLE:
        pass
    # vLLM's parser takes more: NaN, lone surrogates, a byte order mark. It builds all.
    if not json.detect_encoding(body).startswith("utf-8"):
        return None  # members could not be added to it
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict):
        return None
    return Body(**{name: fields[name] for name in _VALUES if name in fields})


def _short_entries(raw: bytes) -> dict[str, Any]:
    """Of an object that is too long."""
    kept, left = {}, MAX_MEMBER_BYTES
    for name, value in _ENTRIES.decode(raw).items():
        if len(bytes(value)) <= left:
            kept[name], left = _VALUE.decode(value), left - len(bytes(value))
    return kept


def member(value: object, *path: str) -> Any:
    """What is at `path` below an object or JSON text of one, None where nothing is."""
    for name in path:
        if isinstance(value, str):
            value = _decoded(value)
        if not isinstance(value, dict):
            return None
        value = value.get(name)
    return value


def members(value: object, *path: str) -> dict[str, Any]:
    """The object, or JSON text of one, at `path`; empty where none is."""
    found = member(value, *path)
    if isinstance(found, str):
        found = _decoded(found)
    return found if isinstance(found, dict) else {}


def _decoded(text: str) -> Any:
    if len(text) > MAX_TEXT_CHARS:
        return None
    try:
        return msgspec.json.decode(text)
    except UNREADABLE:
        return None


def opening(body: Body) -> bytes | None:
    """System prompt and everything up to the first user message.

    It stays the same in all turns of a conversation: enough to send them all to one
    place, too little to call two programs that share it one. None where the request
    does not carry its history. Cache markers wander from turn to turn and are left out.
    """
    if body.previous_response_id is not None:
        return None
    turns = bytes(body.messages) or bytes(body.input)
    try:
        items = _ITEMS.decode(turns)
        roles = [_ROLE.decode(item).role for item in items[:MAX_OPENING]]
    except UNREADABLE:
        return None
    if "user" not in roles:
        return None
    first = items[: roles.index("user") + 1]
    parts = [bytes(body.system), bytes(body.instructions), *map(bytes, first)]
    return _CACHE_CONTROL_FIELD.sub(b"", b"\0".join(parts))


def requested_ttl(raw: bytes) -> str | float | None:
    """The longest TTL that a body asks for, as it was written."""
    wishes = _cache_controls(raw)
    longest = max(wishes, key=lambda wish: wish[0], default=None)
    return None if longest is None else longest[1]


def _cache_controls(raw: bytes) -> Iterator[tuple[float, str | float]]:
    """Seconds, and as written: Anthropic's markers, wherever they stand.

    One without a ttl asks for none: many clients put it into every request.
    """
    for match in _CACHE_CONTROL.finditer(raw):
        try:
            marker = msgspec.json.decode(match[1])
            ttl = marker["ttl"]
            seconds = client_seconds(ttl)
        except (*UNREADABLE, KeyError, UnfitValueError):
            continue
        if marker.get("type") == "ephemeral":
            yield seconds, ttl
