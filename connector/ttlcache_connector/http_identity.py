"""What an HTTP request says about its program: headers, URL, body.

Pure functions on bytes. Nothing here raises on what a client sends: a body that is
no JSON object, or that says nothing, gives an empty `Clues`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

import msgspec

from ttlcache.hints import MAX_ID_CHARS, ROUTE_PREFIX, parse_duration_s

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
_CONTINUUM = ("job_id", "is_last_step", "this_func_call", "last_func_call")
#: A body without any of these bytes has nothing for us and is not parsed.
_MARKERS = re.compile(
    rb'"(?:metadata|prompt_cache_key|safety_identifier|user|session_id|cache_control|'
    + "|".join(_CONTINUUM).encode()
    + rb')"\s*:'
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


@dataclass(frozen=True, slots=True)
class Clues:
    """What was found.

    session: the program's id as vLLM's session id, ASCII and bounded.
    hints: goes to the engine as `kv_transfer_params`, beside what is there.
    params: the body's own `kv_transfer_params`, None when it has none.
    """

    rule: str = "none"
    session: str | None = None
    hints: Mapping[str, Any] = field(default_factory=dict)
    params: Mapping[str, Any] | None = None


class _Body(msgspec.Struct):
    """The fields that we look at; msgspec skips all others without building them."""

    metadata: Any = None
    session_id: Any = None
    prompt_cache_key: Any = None
    safety_identifier: Any = None
    user: Any = None
    job_id: Any = None
    is_last_step: Any = None
    this_func_call: Any = None
    last_func_call: Any = None
    kv_transfer_params: Any = None
    previous_response_id: Any = None
    system: msgspec.Raw = msgspec.Raw(b"")
    instructions: msgspec.Raw = msgspec.Raw(b"")
    messages: msgspec.Raw = msgspec.Raw(b"")
    input: msgspec.Raw = msgspec.Raw(b"")


class _Role(msgspec.Struct):
    role: Any = None


_BODY = msgspec.json.Decoder(_Body)
_ITEMS = msgspec.json.Decoder(list[msgspec.Raw])
_ROLE = msgspec.json.Decoder(_Role)


def label(value: object) -> str | None:
    """An id as a bounded ASCII string, None where it is none.

    A long one, or one that no header can carry, becomes its digest.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value) if abs(value) < 1 << 128 else ""
    if not isinstance(value, str) or not value.strip():
        return None
    text = value.strip()
    if len(text) <= MAX_ID_CHARS and text.isascii() and text.isprintable():
        return text
    return "sha256-" + hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()


def split_path(path: str) -> tuple[str | None, str]:
    """`/sessions/{id}/v1/…` as (id, `/v1/…`); other paths as (None, path)."""
    match = _SESSION_PATH.fullmatch(path)
    if match is None:
        return None, path
    session = label(unquote(match[1]))
    return (None, path) if session is None else (session, match[2])


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
    if not _MARKERS.search(body):
        return Clues()
    try:
        parsed = _BODY.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        return Clues()
    hints: dict[str, Any] = {
        name: value
        for name in _CONTINUUM
        if (value := getattr(parsed, name)) is not None
    }
    ttl = _cache_ttl(body)
    if ttl is not None:
        hints["ttlcache"] = {"ttl": ttl}
    rule, session = _session(parsed)
    params = parsed.kv_transfer_params
    if params is not None and not isinstance(params, dict):
        hints = {}  # vLLM refuses it, and must see it as it is
        params = None
    return Clues(rule, session, hints, params)


def conversation(body: bytes) -> bytes | None:
    """What stays the same in all turns of a conversation, None where nothing does.

    System prompt and first user message: enough to send them all to one place, too
    little to call two programs that share them one.
    """
    try:
        return _opening(_BODY.decode(body))
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        return None


def with_hints(body: bytes, clues: Clues) -> bytes | None:
    """The body with our hints in it, None where there is nothing to add.

    They are appended as the object's last member, so that everything else stays byte
    for byte what the client sent. A client's own hints win.
    """
    if not clues.hints:
        return None
    merged = {**clues.hints, **(clues.params or {})}
    if merged == clues.params:
        return None
    try:
        member = msgspec.json.encode(merged)
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError):
        return None
    added = len(member) - len(msgspec.json.encode(clues.params or {}))
    end = body.rstrip()
    if added > MAX_HINT_BYTES or not end.endswith(b"}"):
        return None
    head = end[:-1].rstrip()
    comma = b"" if head.endswith(b"{") else b","
    return head + comma + b'"kv_transfer_params":' + member + b"}"


def _session(body: _Body) -> tuple[str, str | None]:
    """The id in a body; where there are several the most specific one."""
    metadata = body.metadata if isinstance(body.metadata, dict) else {}
    own = label(body.session_id)
    if own is not None:
        return "body-session", own
    job = label(body.job_id)
    if job is not None:
        return "job-id", job
    claude = _claude_session(metadata.get("user_id"))
    if claude is not None:
        return "claude-code-body", claude
    session = label(metadata.get("session_id"))
    if session is not None:
        return "body-session", session
    return _weak_session(body, metadata)


def _weak_session(body: _Body, metadata: Mapping[str, Any]) -> tuple[str, str | None]:
    found = [(name, label(getattr(body, name))) for name in _WEAK]
    found.append(("user", label(metadata.get("user_id"))))
    for name, value in found:
        if value is None:
            continue
        opening = _opening(body)
        if opening is None:
            break  # the prompt itself tells more than a user's name
        rule = name.replace("_", "-")
        digest = hashlib.sha256(opening + value.encode()).hexdigest()[:32]
        return rule, f"{rule}-{digest}"
    return "none", None


def _claude_session(user_id: object) -> str | None:
    """The session inside Claude Code's `metadata.user_id`: JSON, or a suffix."""
    if not isinstance(user_id, str) or len(user_id) > 4096:
        return None
    if user_id.startswith("{"):
        try:
            fields = msgspec.json.decode(user_id)
        except (msgspec.MsgspecError, RecursionError):
            return None
        return label(fields.get("session_id")) if isinstance(fields, dict) else None
    match = _LEGACY_USER_ID.search(user_id)
    return match[1] if match else None


def _opening(body: _Body) -> bytes | None:
    """System prompt and everything up to the first user message.

    It stays the same from turn to turn. None where the request does not carry its
    history. Cache markers wander from turn to turn and are left out.
    """
    if body.previous_response_id is not None:
        return None
    turns = bytes(body.messages) or bytes(body.input)
    try:
        items = _ITEMS.decode(turns)
        roles = [_ROLE.decode(item).role for item in items[:MAX_OPENING]]
    except msgspec.MsgspecError:
        return None
    if "user" not in roles:
        return None
    opening = items[: roles.index("user") + 1]
    parts = [bytes(body.system), bytes(body.instructions), *map(bytes, opening)]
    return _CACHE_CONTROL_FIELD.sub(b"", b"\0".join(parts))


def _cache_ttl(body: bytes) -> str | None:
    """The longest `cache_control` TTL of an Anthropic request."""
    longest_s, longest = -1.0, None
    for match in _CACHE_CONTROL.finditer(body):
        try:
            marker = msgspec.json.decode(match[1])
            ttl = marker.get("ttl") or _DEFAULT_CACHE_TTL
            seconds = parse_duration_s(ttl)
        except (msgspec.MsgspecError, ValueError):
            continue
        if marker.get("type") == "ephemeral" and seconds > longest_s:
            longest_s, longest = seconds, str(ttl)
    return longest
