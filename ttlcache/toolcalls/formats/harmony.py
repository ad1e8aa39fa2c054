"""gpt-oss: messages with a recipient on the commentary channel."""

from __future__ import annotations

import re

from ttlcache.toolcalls.formats.json_items import named_calls
from ttlcache.types import GapKey

# What follows the name closes it; at the very end of the text it is half-written.
_RECIPIENT = re.compile(
    r"(?<!\S)to=(?!(?:user|assistant|system|developer|all)[\s<{])"
    r"([\w.-]{1,128})(?=[\s<{])"
)
_HEADER_REST = re.compile(r"[^{}\n]{0,96}(?=\{)")


def harmony(text: str) -> tuple[GapKey, ...]:
    """`<|channel|>commentary to=functions.x <|message|>{…}<|call|>`."""
    # Detokenised without special tokens, only the recipient's form is left.
    if "to=functions." not in text and not ("to=" in text and "<|" in text):
        return ()
    return named_calls(text, _RECIPIENT, _HEADER_REST)
