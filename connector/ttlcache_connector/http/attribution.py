"""Claude Code's billing header, taken out of system text.

It stands before everything else, is meant for the vendor's accounting and not for the
model, and changes with the client's version, between agent and sub-agent, and in some
versions with every request: no prefix cache can hit behind it. vLLM drops such blocks
on `/v1/messages`; through a proxy they come in chat messages, and as plain strings.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

_NAME = b"x-anthropic-billing-header"
#: Fields only; what follows them in the same string stays.
_HEADER = re.compile(
    r"x-anthropic-billing-header:(?:[ \t]{0,8}\w{1,40}=[^;\s]{0,200}(?:;|$)){1,20}\s*"
)
_SYSTEM_ROLES = ("system", "developer")
_Object = dict[str, msgspec.Raw]


def without_attribution(body: bytes) -> bytes | None:
    """The body without the header, None where its system text does not begin with it.

    Everything else keeps its bytes, but for blanks between members.
    """
    if _NAME not in body:
        return None
    try:
        fields = msgspec.json.decode(body, type=_Object)
        changed = False
        for name in ("system", "instructions"):
            changed |= _strip_value(fields, name)
        for name in ("messages", "input"):
            changed |= _strip_messages(fields, name)
        return msgspec.json.encode(fields) if changed else None
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        return None


def _strip_messages(fields: _Object, name: str) -> bool:
    raw = fields.get(name)
    if raw is None or not bytes(raw).startswith(b"["):
        return False
    items = msgspec.json.decode(raw, type=list[msgspec.Raw])
    changed = False
    for index, item in enumerate(items):
        if _NAME not in bytes(item):
            continue
        message = msgspec.json.decode(item, type=_Object)
        role = message.get("role")
        if role is None or msgspec.json.decode(role) not in _SYSTEM_ROLES:
            continue
        if _strip_value(message, "content"):
            items[index] = msgspec.Raw(msgspec.json.encode(message))
            changed = True
    if changed:
        fields[name] = msgspec.Raw(msgspec.json.encode(items))
    return changed


def _strip_value(fields: _Object, name: str) -> bool:
    raw = fields.get(name)
    if raw is None or _NAME not in bytes(raw):
        return False
    value = msgspec.json.decode(raw)
    stripped = _stripped(value)
    if stripped == value:
        return False
    fields[name] = msgspec.Raw(msgspec.json.encode(stripped))
    return True


def _stripped(value: Any) -> Any:
    """A string, or a list of text blocks, without headers at their beginnings."""
    if isinstance(value, str):
        match = _HEADER.match(value)
        return value if match is None else value[match.end() :]
    if not isinstance(value, list):
        return value
    parts = []
    for part in value:
        text = part.get("text") if isinstance(part, dict) else None
        rest = _stripped(text) if isinstance(text, str) else text
        if rest == text:
            parts.append(part)
        elif rest:
            parts.append({**part, "text": rest})
    return parts or ""
