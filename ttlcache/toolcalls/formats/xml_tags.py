"""Calls in XML-like tags: Anthropic's invoke, Qwen3-coder's and OpenHands' function."""

from __future__ import annotations

import re

from ttlcache.toolcalls.base import MAX_CALLS
from ttlcache.toolcalls.keys import key_for_tool
from ttlcache.types import GapKey


def parse_tags(text: str, tags: re.Pattern[str]) -> tuple[GapKey, ...]:
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
