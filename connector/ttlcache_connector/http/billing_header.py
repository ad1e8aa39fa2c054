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


def without_billing_header(body: bytes) -> bytes | None:
    """The body without the header, None where its system text does not begin with it.

    Members without the header keep their bytes, but for blanks between them.
    """
    if _NAME not in body:
        return None
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        changed = False
        for name in ("system", "instructions", "messages", "input"):
            if _NAME not in bytes(fields.get(name, b"")):
                continue
            value = msgspec.json.decode(fields[name])
            is_text = name in ("system", "instructions")
            stripped = _stripped(value) if is_text else _stripped_messages(value)
            if stripped != value:
                fields[name] = msgspec.Raw(msgspec.json.encode(stripped))
                changed = True
        return msgspec.json.encode(fields) if changed else None
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        return None


def _stripped_messages(messages: Any) -> Any:
    if not isinstance(messages, list):
        return messages
    return [
        {**each, "content": _stripped(each["content"])}
        if isinstance(each, dict)
        and each.get("role") in _SYSTEM_ROLES
        and "content" in each
        else each
        for each in messages
    ]


def _stripped(value: Any) -> Any:
    """A string, or a list of text blocks, without headers at their beginnings."""
    if isinstance(value, str):
        match = _HEADER.match(value)
        return value if match is None else value[match.end() :]
    if not value or not isinstance(value, list):
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
