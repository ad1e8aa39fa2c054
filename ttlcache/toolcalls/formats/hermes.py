"""Hermes and Qwen: JSON after a `<tool_call>` tag; GLM: name and arg_key tags."""

from __future__ import annotations

import re

from ttlcache.toolcalls.formats.json_items import tagged_keys
from ttlcache.toolcalls.keys import key_for_tool
from ttlcache.toolcalls.lenient_json import read_json
from ttlcache.types import GapKey

_TAG = re.compile(r"<\|?(?:tool_calls?|TOOLCALL)\|?>\s{0,16}")
_GLM_NAME = re.compile(r"([\w.-]{1,128})\s{0,16}(?=<arg_key>|</tool_call>)")
_GLM_ARGUMENT = re.compile(
    r"<arg_key>([\w.-]{1,128})</arg_key>\s{0,16}<arg_value>|</arg_value>"
    r"|</?\|?(?:tool_calls?|TOOLCALL)\|?>"  # any `_TAG`: else quadratic
)


def hermes(text: str) -> tuple[GapKey, ...]:
    """`<tool_call>{"name": …, "arguments": …}</tool_call>` and its relatives."""
    keys: list[GapKey] = []
    pos = 0
    while tag := _TAG.search(text, pos):
        pos = tag.end()
        if text.startswith(("{", "["), pos):
            read = read_json(text, pos)
            keys += tagged_keys(read.value)
            pos = max(pos, read.end)
        elif name := _GLM_NAME.match(text, pos):
            keys.append(key_for_tool(name[1], _glm_arguments(text, name.end())))
    return tuple(keys)


def _glm_arguments(text: str, pos: int) -> dict[str, object]:
    arguments: dict[str, object] = {}
    key, start = None, 0
    for tag in _GLM_ARGUMENT.finditer(text, pos):
        if tag[1]:
            key, start = tag[1], tag.end()
        elif tag[0] != "</arg_value>" or key is None:
            break
        else:
            arguments[key] = text[start : tag.start()]
            key = None
    return arguments
