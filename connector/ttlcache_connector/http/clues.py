"""What an HTTP request says about its program: headers, URL, body.

Pure functions on bytes. Nothing here raises on what a client sends: a body that is
no JSON object, or that says nothing, gives an empty `Clues`. The names that are looked
for are in `known_clients`. Values go through `ttlcache.programs.client_values`; what
does not fit is left out, with the reason.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from urllib.parse import unquote

from ttlcache.programs.client_values import fitting, holds_wide_int, is_encodable
from ttlcache.programs.hints import clean_hint, parse_hints
from ttlcache_connector.http.body import Body, parse, requested_ttl, tells_something
from ttlcache_connector.http.known_clients import CONTINUUM_FIELDS
from ttlcache_connector.http.naming import (
    checked,
    in_body,
    in_headers,
    in_objects,
    label,
)

_SESSION_PATH = re.compile(r"/sessions/([^/]+)(/.+)", re.DOTALL)
#: Hints larger than this in JSON are no hints.
MAX_HINT_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Clues:
    """What was found.

    session: the program's id as vLLM's session id, ASCII and bounded.
    hints: goes to the engine as `kv_transfer_params`, beside what is there.
    params: the body's own `kv_transfer_params` as far as they fit, None when it has
        none.
    replaced: members of the body that must not go on as they are.
    dropped: for each value that is not used, why.
    named: the id in the body's hints or `session_id`, which outranks any header.
    """

    rule: str = "none"
    session: str | None = None
    hints: Mapping[str, Any] = field(default_factory=dict)
    params: Mapping[str, Any] | None = None
    replaced: Mapping[str, Any] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()
    named: str | None = None

    @property
    def parent(self) -> str | None:
        """The program that started this one."""
        parent: str | None = self.hints.get("ttlcache", {}).get("parent_id")
        return parent


NO_CLUES = Clues()


def split_path(path: str) -> tuple[str | None, str]:
    """A raw `/sessions/{id}/v1/…` as (id, `/v1/…`); other paths as (None, path).

    The path goes on without an id that is none, too.
    """
    match = _SESSION_PATH.fullmatch(path)
    if match is None:
        return None, path
    return label(unquote(match[1])), match[2]


def from_headers(
    headers: Iterable[tuple[bytes, bytes]], url_session: str | None = None
) -> Clues:
    """What headers say, and the URL where none of them names a program."""
    found = {name.lower(): value.decode("latin-1") for name, value in headers}
    dropped: list[str] = []
    named = in_headers(found, dropped)
    if named.session is None and url_session is not None:
        named.rule, named.session = "url", url_session
    return Clues(
        named.rule,
        named.session,
        {"ttlcache": named.hints} if named.hints else {},
        dropped=tuple(dropped),
    )


def from_body(body: bytes, before: Clues = NO_CLUES) -> Clues:
    """Everything that a request says.

    Args:
        before: what its headers and its URL say, which outranks the body.
    """
    is_read = before.hints or tells_something(body)
    parsed = parse(body) if is_read else None
    if parsed is None:
        return replace(before, hints={})
    dropped = list(before.dropped)
    hints: dict[str, Any] = {}
    for name in CONTINUUM_FIELDS:
        value = checked(partial(clean_hint, name), getattr(parsed, name), dropped)
        if value is not None:
            hints[name] = value
    named = in_objects(parsed, dropped)
    ttl = requested_ttl(body)
    own = {**named.hints, **before.hints.get("ttlcache", {})}
    if ttl is not None:
        own["ttl"] = ttl
    if own:
        hints["ttlcache"] = own
    params = parsed.kv_transfer_params
    if params is not None and not isinstance(params, dict):
        hints = {}  # vLLM refuses it, and must see it as it is
        params = None
    replaced = _replaced(parsed, dropped)
    rule, session = in_body(parsed, hints.get("job_id"), named, dropped)
    if before.session is not None:
        rule, session = before.rule, before.session
    params = replaced.get("kv_transfer_params", params)
    by_body = _named(parsed, merge_hints(hints, params or {}))
    return Clues(rule, session, hints, params, replaced, tuple(dropped), named=by_body)


def with_hints(body: bytes, clues: Clues) -> bytes | None:
    """The body with our hints in it, None where there is nothing to change.

    What changes is appended as the object's last members, so that everything else stays
    byte for byte what the client sent. A client's own hints win.
    """
    changed = dict(clues.replaced)
    params = clues.params or {}
    merged = merge_hints(clues.hints, params)
    end = body.rstrip()
    try:
        if merged != params and len(json.dumps(clues.hints)) <= MAX_HINT_BYTES:
            changed["kv_transfer_params"] = merged
        # As vLLM's own parser has it: it knows NaN and integers of any size.
        added = json.dumps(changed, separators=(",", ":"))[1:].encode()
    except (ValueError, RecursionError):
        return None
    if not changed or not end.endswith(b"}"):
        return None
    head = end[:-1].rstrip()
    return head + (b"" if head.endswith(b"{") else b",") + added


def merge_hints(found: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """What was found, and a client's own `kv_transfer_params`, which win."""
    merged = {**found, **own}
    ours, theirs = found.get("ttlcache"), own.get("ttlcache")
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        merged["ttlcache"] = {**ours, **theirs}
    return merged


def _replaced(body: Body, dropped: list[str]) -> dict[str, Any]:
    """Members that vLLM could not take to its engine, as far as they fit."""
    replaced: dict[str, Any] = {}
    params, xargs = body.kv_transfer_params, body.vllm_xargs
    if isinstance(params, dict) and not holds_wide_int(params):
        kept, reasons = fitting(params)
        if reasons or "kv_transfer_params" in body.unread:
            replaced["kv_transfer_params"] = kept
            dropped += reasons
    dropped += ["nested_too_large"] * len(body.unread)
    if isinstance(xargs, dict):
        # vLLM itself refuses what is nested in them.
        kept = {k: v for k, v in xargs.items() if is_encodable(k) and not _is_odd(v)}
        if len(kept) < len(xargs):
            replaced["vllm_xargs"] = kept
            dropped += ["nested_encoding"] * (len(xargs) - len(kept))
    if _is_odd(body.session_id):
        replaced["session_id"] = None  # `in_body` counts it
    return replaced


def _named(body: Body, params: Mapping[str, Any]) -> str | None:
    """The id by which the engine goes whatever headers say."""
    own = body.session_id
    fits = isinstance(own, str) and is_encodable(own)
    return parse_hints(params, body.vllm_xargs).program_id or (own if fits else None)


def _is_odd(value: object) -> bool:
    """Whether it is text that is not UTF-8."""
    return isinstance(value, str) and not is_encodable(value)
