"""gpt-oss: messages with a recipient on the commentary channel."""

from __future__ import annotations

import re

from ttlcache.toolcalls.formats.json_items import named_call
from ttlcache.toolcalls.keys import key_for_tool
from ttlcache.types import GapKey

# What follows the name closes it; at the very end of the text it is half-written.
_RECIPIENT = re.compile(r"(?<!\S)to=([\w.-]{1,128})(?=[\s<{])")
_HEADER_REST = re.compile(r"[^{}\n]{0,96}(?=\{)")
_NOT_TOOLS = frozenset({"user", "assistant", "system", "developer", "all"})


def harmony(text: str) -> tuple[GapKey, ...]:
    """`<|channel|>commentary to=functions.x <|message|>{…}<|call|>`."""
    # Detokenised without special tokens, only the recipient's form is left.
    if "to=functions." not in text and not ("to=" in text and "<|" in text):
        return ()
    keys: list[GapKey] = []
    pos = 0
    while recipient := _RECIPIENT.search(text, pos):
        pos = recipient.end()
        name = recipient[1]
        if name in _NOT_TOOLS:
            continue
        key = key_for_tool(name)
        if header := _HEADER_REST.match(text, pos):
            key, pos = named_call(name, text, header.end())
        keys.append(key)
    return tuple(keys)
