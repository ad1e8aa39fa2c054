"""DeepSeek and Kimi: begin and end markers around every call."""

from __future__ import annotations

import re

from ttlcache.toolcalls.formats.json_items import named_call
from ttlcache.toolcalls.keys import key_for_tool
from ttlcache.types import GapKey

# DeepSeek writes full-width bars and U+2581; some servers render them in ASCII.
_BEGIN = re.compile("<[\uff5c|]tool[\u2581_]call[\u2581_]begin[\uff5c|]>\\s{0,16}")
# "name SEP {…}", or in V3 and R1 "function SEP name" and a fenced block.
_NAME = re.compile(
    "(?:function<[\uff5c|]tool[\u2581_]sep[\uff5c|]>)?+"
    "([\\w.-]{1,128})(?::\\d{1,4})?\\s{0,16}"
    "(?:<[\uff5c|]tool[\u2581_](?:sep|call_argument_begin)[\uff5c|]>|(?<=\\n))"
)
_TO_ARGUMENTS = re.compile(r"\s{0,16}(?:```(?:json)?)?\s{0,16}(?=\{)")


def deepseek(text: str) -> tuple[GapKey, ...]:
    """A begin marker, the name, a separator, JSON arguments, an end marker."""
    keys: list[GapKey] = []
    pos = 0
    while begin := _BEGIN.search(text, pos):
        pos = begin.end()
        name = _NAME.match(text, pos)
        if name is None:
            continue
        key, pos = key_for_tool(name[1]), name.end()
        if opening := _TO_ARGUMENTS.match(text, pos):
            key, pos = named_call(name[1], text, opening.end())
        keys.append(key)
    return tuple(keys)
