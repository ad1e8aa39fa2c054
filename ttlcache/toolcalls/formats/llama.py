"""Llama: pythonic calls in a list, and what follows `<|python_tag|>`."""

from __future__ import annotations

import re

from ttlcache.toolcalls.formats.json_items import tagged_keys
from ttlcache.toolcalls.keys import key_for_tool
from ttlcache.toolcalls.lenient_json import read_json
from ttlcache.types import GapKey

#: Llama's built-in tool: bare code after the tag.
CODE_TOOL = "code_interpreter"
_PYTHON_TAG = "<|python_tag|>"
_BUILTIN = re.compile(r"\s{0,16}([A-Za-z_]\w{0,63})\.call\(")

# A list at the start of a line whose first element is a call by keywords: prose
# such as "[see](x)" is none, nor is a list of plain values.
_LIST = re.compile(
    r"(?:^|<\|python_start\|>)[ \t]{0,8}\["
    r"(?=\s{0,16}[A-Za-z_][\w.-]{0,127}\(\s{0,16}(?:\)|[A-Za-z_]\w{0,127}\s?=|\Z))",
    re.MULTILINE,
)
_TOKEN = re.compile(
    r"""(?P<text>"[^"\\]*+(?:\\.[^"\\]*+)*+"|'[^'\\]*+(?:\\.[^'\\]*+)*+')
      | (?P<call>[A-Za-z_][\w.-]{0,127})\(
      | (?P<keyword>[A-Za-z_]\w{0,127})\s?=(?!=)
      | (?P<open>[(\[{]) | (?P<close>[)\]}])
      | (?P<quote>["'])
      | [^"'()\[\]{}A-Za-z_]++ | \w++""",
    re.VERBOSE | re.DOTALL,
)


def llama_python_tag(text: str) -> tuple[GapKey, ...]:
    """`<|python_tag|>` with JSON, a built-in `tool.call(…)`, or code."""
    _, found, rest = text.rpartition(_PYTHON_TAG)
    rest = rest.lstrip()
    if not found or not rest:
        return ()
    if not rest.startswith(("{", "[")):
        builtin = _BUILTIN.match(rest)
        return (key_for_tool(builtin[1] if builtin else CODE_TOOL),)
    keys: list[GapKey] = []
    while rest.startswith(("{", "[")):
        read = read_json(rest)
        keys += tagged_keys(read.value)
        rest = rest[read.end :].lstrip("; \n") if read.complete else ""
    return tuple(keys)


def llama_pythonic(text: str) -> tuple[GapKey, ...]:
    """`[get_weather(city="x"), f(y=1)]`."""
    start = _LIST.search(text)
    return tuple(_calls(text, start.end())) if start else ()


def _calls(text: str, pos: int) -> list[GapKey]:
    """The calls of a list whose opening bracket ends at `pos`."""
    calls: list[tuple[str, dict[str, object]]] = []
    depth, keyword = 1, ""
    while depth and (token := _TOKEN.match(text, pos)) and not token["quote"]:
        pos = token.end()
        if token["call"] or token["open"]:
            if token["call"] and depth == 1:
                calls.append((token["call"], {}))
            depth += 1
        elif token["close"]:
            depth -= 1
        elif token["keyword"]:
            keyword = token["keyword"]
        elif token["text"] and depth == 2 and calls:
            calls[-1][1].setdefault(keyword, token["text"][1:-1])
    return [key_for_tool(name, arguments) for name, arguments in calls]
