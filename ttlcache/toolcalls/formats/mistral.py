"""Mistral: `[TOOL_CALLS]` with a JSON list, or with a name and its arguments."""

from __future__ import annotations

import re

from ttlcache.toolcalls.items import tagged_keys
from ttlcache.toolcalls.keys import key_for_tool
from ttlcache.toolcalls.lenient_json import read_json
from ttlcache.types import GapKey

_MARK = "[TOOL_CALLS]"
_NAMED = re.compile(
    r"\s{0,16}([\w.-]{1,128})(?:\[CALL_ID\]\w{0,64})?(?:\[ARGS\])?\s{0,16}(?=[{\[])"
)


class Mistral:
    """`[TOOL_CALLS][{"name": …}]` and, of newer models, `[TOOL_CALLS]name{…}`."""

    name = "mistral"

    def parse(self, text: str) -> tuple[GapKey, ...]:
        keys: list[GapKey] = []
        pos = text.find(_MARK)
        while pos >= 0:
            pos += len(_MARK)
            while text[pos : pos + 1].isspace():
                pos += 1
            if named := _NAMED.match(text, pos):
                value = read_json(text, named.end())
                arguments = value.value if isinstance(value.value, dict) else None
                keys.append(key_for_tool(named[1], arguments))
                pos = max(value.end, named.end())
            elif text.startswith(("[", "{"), pos):
                value = read_json(text, pos)
                keys += tagged_keys(value.value)
                pos = max(pos, value.end)
            pos = text.find(_MARK, pos)
        return tuple(keys)
