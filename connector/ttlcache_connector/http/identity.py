"""What an HTTP request says about its program: headers, URL, body.

Pure functions on bytes. Nothing here raises on what a client sends: a body that is
no JSON object, or that says nothing, gives an empty `Clues`. Values go through
`ttlcache.programs.client_values`; what does not fit is left out, with the reason.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

import msgspec

from ttlcache.programs.client_values import (
    UnfitValueError,
    client_seconds,
    fitting,
    header_id,
    holds_wide_int,
    is_encodable,
)
from ttlcache.programs.hints import ROUTE_PREFIX, clean_hint

#: vLLM's own header; it outranks everything found here (rule 2).
SESSION_HEADER = b"x-session-id"
#: Header -> rule. The first one present wins.
STRONG_HEADERS: dict[bytes, str] = {
    b"x-ttlcache-program": "x-ttlcache-program",
    b"x-claude-code-session-id": "claude-code",
    b"x-session-affinity": "session-affinity",
    b"session-id": "codex",
    b"session_id": "codex",
}
#: Every label that `Clues.rule` may hold; metric labels come from here only.
RULES = (
    *dict.fromkeys(STRONG_HEADERS.values()),
    "x-session-id",
    "url",
    "job-id",
    "body-session",
    "claude-code-body",
    "prompt-cache-key",
    "safety-identifier",
    "user",
    "none",
)
#: Ids that name a user or a kind of job rather than one program: they are joined
#: with the conversation's opening, which tells one user's programs apart.
_WEAK = ("prompt_cache_key", "safety_identifier", "user")
#: vllm-continuum's top-level fields; `parse_hints` knows them by these names.
_CONTINUUM = ("job_id", "is_last_step", "this_func_call")
#: A body without any of these bytes has nothing for us and is not parsed.
_MARKERS = re.compile(
    rb'"(?:metadata|prompt_cache_key|safety_identifier|user|session_id|cache_control|'
    rb"kv_transfer_params|vllm_xargs|" + "|".join(_CONTINUUM).encode() + rb')"\s*:'
)
_CACHE_CONTROL = re.compile(rb'"cache_control"\s*:\s*(\{[^{}]*\})')
#: Blanks are counted: a long run must not be looked at from each of its blanks.
_CACHE_CONTROL_FIELD = re.compile(
    rb'(?:,\s{0,99})?"cache_control"\s*:\s*(?:\{[^{}]*\}|null)'
)
_LEGACY_USER_ID = re.compile(r"_session_([0-9A-Za-z-]{8,64})$")
#: Anthropic's default for a marker without a ttl.
_DEFAULT_CACHE_TTL = "5m"
_SESSION_PATH = re.compile(r"/sessions/([^/]+)(/.+)", re.DOTALL)
#: Messages among which the first user message is looked for.
MAX_OPENING = 16
#: Hints larger than this in JSON are no hints.
MAX_HINT_BYTES = 4096
#: What decoding may raise on a client's bytes.
_UNREADABLE = (msgspec.MsgspecError, RecursionError, ValueError, OverflowError)


@dataclass(frozen=True, slots=True)
class Clues:
    """What was found.

    session: the program's id as vLLM's session id, ASCII and bounded.
    hints: goes to the engine as `kv_transfer_params`, beside what is there.
    params: the body's own `kv_transfer_params` as far as they fit, None when it has
        none.
    replaced: members of the body that must not go on as they are.
    dropped: for each value that is not used, why.
    """

    rule: str = "none"
    session: str | None = None
    hints: Mapping[str, Any] = field(default_factory=dict)
    params: Mapping[str, Any] | None = None
    replaced: Mapping[str, Any] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()


class Body(msgspec.Struct):
    """The fields that we look at; msgspec skips all others without building them."""

    metadata: Any = None
    session_id: Any = None
    prompt_cache_key: Any = None
    safety_identifier: Any = None
    user: Any = None
    job_id: Any = None
    is_last_step: Any = None
    this_func_call: Any = None
    kv_transfer_params: Any = None
    vllm_xargs: Any = None
    previous_response_id: Any = None
    system: msgspec.Raw = msgspec.Raw(b"")
    instructions: msgspec.Raw = msgspec.Raw(b"")
    messages: msgspec.Raw = msgspec.Raw(b"")
    input: msgspec.Raw = msgspec.Raw(b"")
    prompt: msgspec.Raw = msgspec.Raw(b"")


class _Role(msgspec.Struct):
    role: Any = None


_RAW = frozenset({"system", "instructions", "messages", "input", "prompt"})
_SCALARS = tuple(name for name in Body.__struct_fields__ if name not in _RAW)
_BODY = msgspec.json.Decoder(Body)
_ITEMS = msgspec.json.Decoder(list[msgspec.Raw])
_ROLE = msgspec.json.Decoder(_Role)


def label(value: object) -> str | None:
    """An id as a bounded ASCII string, None where it is none."""
    try:
        return header_id(value)
    except UnfitValueError:
        return None


def split_path(path: str) -> tuple[str | None, str]:
    """A raw `/sessions/{id}/v1/…` as (id, `/v1/…`); other paths as (None, path).

    The path goes on without an id that is none, too.
    """
    match = _SESSION_PATH.fullmatch(path)
    if match is None:
        return None, path
    return label(unquote(match[1])), match[2]


def from_headers(headers: Iterable[tuple[bytes, bytes]]) -> tuple[str, str] | None:
    """(rule, id) of the first header that names a program."""
    found = {name.lower(): value for name, value in headers}
    own = label(found.get(SESSION_HEADER, b"").decode("latin-1"))
    if own is not None and not own.startswith(ROUTE_PREFIX):
        return "x-session-id", own
    for name, rule in STRONG_HEADERS.items():
        session = label(found.get(name, b"").decode("latin-1"))
        if session is not None:
            return rule, session
    return None


def from_body(body: bytes) -> Clues:
    """Everything that a request body says."""
    parsed = parse(body) if _MARKERS.search(body) else None
    if parsed is None:
        return Clues()
    dropped: list[str] = []
    hints: dict[str, Any] = {}
    for name in _CONTINUUM:
        value = getattr(parsed, name)
        try:
            if value is not None:
                hints[name] = clean_hint(name, value)
        except UnfitValueError as unfit:
            dropped.append(str(unfit))
    ttl = _cache_ttl(body)
    if ttl is not None:
        hints["ttlcache"] = {"ttl": ttl}
    params = parsed.kv_transfer_params
    if params is not None and not isinstance(params, dict):
        hints = {}  # vLLM refuses it, and must see it as it is
        params = None
    replaced = _replaced(parsed, dropped)
    rule, session = _session(parsed, hints.get("job_id"), dropped)
    params = replaced.get("kv_transfer_params", params)
    return Clues(rule, session, hints, params, replaced, tuple(dropped))


def with_hints(body: bytes, clues: Clues) -> bytes | None:
    """The body with our hints in it, None where there is nothing to change.

    What changes is appended as the object's last members, so that everything else stays
    byte for byte what the client sent. A client's own hints win.
    """
    members = dict(clues.replaced)
    params = clues.params or {}
    merged = {**clues.hints, **params}
    end = body.rstrip()
    try:
        if merged != params and len(json.dumps(clues.hints)) <= MAX_HINT_BYTES:
            members["kv_transfer_params"] = merged
        # As vLLM's own parser has it: it knows NaN and integers of any size.
        added = json.dumps(members, separators=(",", ":"))[1:].encode()
    except (ValueError, RecursionError):
        return None
    if not members or not end.endswith(b"}"):
        return None
    head = end[:-1].rstrip()
    return head + (b"" if head.endswith(b"{") else b",") + added


def parse(body: bytes) -> Body | None:
    """The fields that we look at, None where the body is no JSON object."""
    try:
        return _BODY.decode(body)
    except _UNREADABLE:
        pass
    # vLLM's parser takes more: NaN, lone surrogates, a byte order mark.
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict):
        return None
    return Body(**{name: fields[name] for name in _SCALARS if name in fields})


def _replaced(body: Body, dropped: list[str]) -> dict[str, Any]:
    """Members that vLLM could not take to its engine, as far as they fit."""
    replaced: dict[str, Any] = {}
    params, xargs = body.kv_transfer_params, body.vllm_xargs
    if isinstance(params, dict) and not holds_wide_int(params):
        kept, reasons = fitting(params)
        if reasons:
            replaced["kv_transfer_params"] = kept
            dropped += reasons
    if isinstance(xargs, dict):
        # vLLM itself refuses what is nested in them.
        kept = {k: v for k, v in xargs.items() if is_encodable(k) and not _is_odd(v)}
        if len(kept) < len(xargs):
            replaced["vllm_xargs"] = kept
            dropped += ["nested_encoding"] * (len(xargs) - len(kept))
    if _is_odd(body.session_id):
        replaced["session_id"] = None  # `_session` counts it
    return replaced


def _is_odd(value: object) -> bool:
    """Whether it is text that is not UTF-8."""
    return isinstance(value, str) and not is_encodable(value)


def _session(body: Body, job: str | None, dropped: list[str]) -> tuple[str, str | None]:
    """The id in a body; where there are several the most specific one."""
    metadata = body.metadata if isinstance(body.metadata, dict) else {}
    own = _id(body.session_id, dropped)
    if own is not None:
        return "body-session", own
    named = label(job)
    if named is not None:
        return "job-id", named
    claude = _claude_session(metadata.get("user_id"))
    if claude is not None:
        return "claude-code-body", claude
    session = _id(metadata.get("session_id"), dropped)
    if session is not None:
        return "body-session", session
    return _weak_session(body, metadata, dropped)


def _id(value: object, dropped: list[str]) -> str | None:
    if value is None:
        return None
    try:
        return header_id(value)
    except UnfitValueError as unfit:
        dropped.append(str(unfit))
        return None


def _weak_session(
    body: Body, metadata: Mapping[str, Any], dropped: list[str]
) -> tuple[str, str | None]:
    found = [(name, _id(getattr(body, name), dropped)) for name in _WEAK]
    found.append(("user", _id(metadata.get("user_id"), dropped)))
    for name, value in found:
        if value is None:
            continue
        conversation = opening(body)
        if conversation is None:
            break  # the prompt itself tells more than a user's name
        rule = name.replace("_", "-")
        digest = hashlib.sha256(conversation + value.encode()).hexdigest()[:32]
        return rule, f"{rule}-{digest}"
    return "none", None


def _claude_session(user_id: object) -> str | None:
    """The session inside Claude Code's `metadata.user_id`: JSON, or a suffix."""
    if not isinstance(user_id, str) or len(user_id) > 4096:
        return None
    if user_id.startswith("{"):
        try:
            fields = msgspec.json.decode(user_id)
        except _UNREADABLE:
            return None
        return label(fields.get("session_id")) if isinstance(fields, dict) else None
    match = _LEGACY_USER_ID.search(user_id)
    return match[1] if match else None


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
    except _UNREADABLE:
        return None
    if "user" not in roles:
        return None
    first = items[: roles.index("user") + 1]
    parts = [bytes(body.system), bytes(body.instructions), *map(bytes, first)]
    return _CACHE_CONTROL_FIELD.sub(b"", b"\0".join(parts))


def _cache_ttl(body: bytes) -> str | float | None:
    """The longest `cache_control` TTL of an Anthropic request."""
    longest_s: float = -1.0
    longest: str | float | None = None
    for match in _CACHE_CONTROL.finditer(body):
        try:
            marker = msgspec.json.decode(match[1])
            ttl = marker.get("ttl") or _DEFAULT_CACHE_TTL
            seconds = client_seconds(ttl)
        except (*_UNREADABLE, UnfitValueError):
            continue
        if marker.get("type") == "ephemeral" and seconds > longest_s:
            longest_s, longest = seconds, ttl
    return longest
