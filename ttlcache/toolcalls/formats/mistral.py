"""Mistral: `[TOOL_CALLS]` with a JSON list, or with a name and its arguments."""

from __future__ import annotations

import re

from ttlcache.toolcalls.formats.json_items import named_call, tagged_keys
from ttlcache.toolcalls.lenient_json import read_json
from ttlcache.types import GapKey

_MARK = "[TOOL_CALLS]"
_NAMED = re.compile(
    r"\s{0,16}([\w.-]{1,128})(?:\[CALL_ID\]\w{0,64})?(?:\[ARGS\])?\s{0,16}(?=[{\[])"
)


def mistral(text: str) -> tuple[GapKey, ...]:
    """`[TOOL_CALLS][{"name": …}]` and, of newer models, `[TOOL_CALLS]name{…}`."""
    keys: list[GapKey] = []
    pos = text.find(_MARK)
    while pos >= 0:
        pos += len(_MARK)
        while text[pos : pos + 1].isspace():
            pos += 1
        if named := _NAMED.match(text, pos):
            key, pos = named_call(named[1], text, named.end())
            keys.append(key)
        elif text.startswith(("[", "{"), pos):
            value = read_json(text, pos)
            keys += tagged_keys(value.value)
            pos = max(pos, value.end)
        pos = text.find(_MARK, pos)
    return tuple(keys)
