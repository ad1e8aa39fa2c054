"""DeepSeek and Kimi: begin and end markers around every call."""

from __future__ import annotations

import re

from ttlcache.toolcalls.formats.json_items import named_calls
from ttlcache.types import GapKey

# DeepSeek writes full-width bars and U+2581; some servers render them in ASCII.
# Then "name SEP {…}", or in V3 and R1 "function SEP name" and a fenced block.
_CALL = re.compile(
    "<[\uff5c|]tool[\u2581_]call[\u2581_]begin[\uff5c|]>\\s{0,16}"
    "(?:function<[\uff5c|]tool[\u2581_]sep[\uff5c|]>)?+"
    "([\\w.-]{1,128})(?::\\d{1,4})?\\s{0,16}"
    "(?:<[\uff5c|]tool[\u2581_](?:sep|call_argument_begin)[\uff5c|]>|(?<=\\n))"
)
_TO_ARGUMENTS = re.compile(r"\s{0,16}(?:```(?:json)?)?\s{0,16}(?=\{)")


def deepseek(text: str) -> tuple[GapKey, ...]:
    """A begin marker, the name, a separator, JSON arguments, an end marker."""
    return named_calls(text, _CALL, _TO_ARGUMENTS)
