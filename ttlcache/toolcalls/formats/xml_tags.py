"""Calls in XML-like tags: Anthropic's invoke; Qwen3-coder's and OpenHands' function."""

from __future__ import annotations

import re

from ttlcache.toolcalls.base import MAX_CALLS
from ttlcache.toolcalls.keys import key_for_tool
from ttlcache.types import GapKey

# Some models put a namespace or a marker before the tag's name.
_INVOKE = re.compile(
    r"""<[^\s<>/"]{0,16}invoke\s+name="(?P<call>[^"<>\n]{1,128})"\s?>
      | (?P<end_call></[^\s<>/"]{0,16}invoke>)
      | <[^\s<>/"]{0,16}parameter\s+name="(?P<param>[^"<>\n]{1,128})"[^<>\n]{0,64}>
      | (?P<end_param></[^\s<>/"]{0,16}parameter>)""",
    re.VERBOSE,
)
_FUNCTION = re.compile(
    r"""<function=(?P<call>[\w.:/-]{1,128})\s?>
      | (?P<end_call></function>)
      | <parameter=(?P<param>[\w.:/-]{1,128})\s?>
      | (?P<end_param></parameter>)""",
    re.VERBOSE,
)


def anthropic_invoke(text: str) -> tuple[GapKey, ...]:
    """`<invoke name="Bash"><parameter name="command">…</parameter></invoke>`.

    Anthropic's textual form of tool_use; its JSON blocks are in `json_items`.
    """
    return _parse(text, _INVOKE) if "invoke" in text else ()


def function_xml(text: str) -> tuple[GapKey, ...]:
    """`<function=execute_bash><parameter=command>…</parameter></function>`.

    The function's name is inside the opening tag.
    """
    return _parse(text, _FUNCTION) if "<function=" in text else ()


def _parse(text: str, tags: re.Pattern[str]) -> tuple[GapKey, ...]:
    """Calls by a pattern whose groups are call, end_call, param and end_param.

    One pass. Values may hold anything but the closing tags. A value that nothing
    closes is half-written and left out.
    """
    calls: list[tuple[str, dict[str, object]]] = []
    parameter, start = "", 0
    for tag in tags.finditer(text):
        if parameter and tag["call"] is None:
            calls[-1][1][parameter] = text[start : tag.start()].strip()
            parameter = ""
        if parameter:
            continue  # an opening tag in a value: the value talks about calls
        if tag["call"] is not None:
            if len(calls) == MAX_CALLS:
                break
            calls.append((tag["call"], {}))
        elif tag["param"] is not None and calls:
            parameter, start = tag["param"], tag.end()
    return tuple(key_for_tool(name, arguments) for name, arguments in calls)
