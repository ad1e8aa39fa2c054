"""Calls in structured form: the objects of the OpenAI and Anthropic interfaces.

As items of a request, or as bare JSON in the text: OpenAI items, `tool_calls`,
Anthropic `tool_use`, Llama 3.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from ttlcache.toolcalls.base import MAX_CALLS, combine
from ttlcache.toolcalls.keys import key_for_tool
from ttlcache.toolcalls.lenient_json import read_json, read_objects
from ttlcache.types import GapKey

_CALL_TYPES = frozenset(
    {"function_call", "tool_use", "tool_call", "custom_tool_call", "mcp_call"}
)
_SHELL_CALL_TYPES = frozenset({"local_shell_call", "shell_call"})
# A bare object with a name is a call only if it also has arguments.
_ARGUMENTS = ("arguments", "parameters")
_CALL_LISTS = ("tool_calls", "content", "output")
_MAX_NESTING = 3


def json_items(text: str) -> tuple[GapKey, ...]:
    """JSON objects that are calls by their shape, anywhere in the text."""
    if not any(mark in text for mark in ('name"', "name'", "shell_call")):
        return ()
    return tuple(key for read in read_objects(text) for key in keys_in(read.value))


def detect_items(items: Sequence[Mapping[str, object]]) -> GapKey | None:
    """The gap key of `function_call` items, `tool_calls` or `tool_use` blocks.

    Whole messages that hold such lists will do as well. Other items, such as text
    and results, are passed over; malformed ones too.
    """
    return combine(keys_in(list(items)))


def keys_in(value: object, nesting: int = 0) -> list[GapKey]:
    """The keys of all calls in a decoded JSON value."""
    if isinstance(value, Mapping):
        key = _call_key(value)
        if key is not None:
            return [key]
        found = [value[field] for field in _CALL_LISTS if field in value]
        found.append(value.get("function_call"))
        lists = [part for part in found if isinstance(part, list | tuple | Mapping)]
        return keys_in(lists, nesting + 1) if lists else []
    keys: list[GapKey] = []
    if isinstance(value, list | tuple) and nesting <= 2 * _MAX_NESTING:
        for part in value[:MAX_CALLS]:
            keys.extend(keys_in(part, nesting + 1))
    return keys[:MAX_CALLS]


def tagged_keys(value: object) -> list[GapKey]:
    """As `keys_in`, for JSON that stands after a tag that announces a call.

    There a name is enough: half-written arguments do not make it doubtful.
    """
    if isinstance(value, list):
        return [key for part in value[:MAX_CALLS] for key in tagged_keys(part)]
    if isinstance(value, Mapping) and _is_name(name := value.get("name")):
        return [key_for_tool(str(name), _arguments_of(value))]
    return keys_in(value)


def named_call(name: str, text: str, pos: int) -> tuple[GapKey, int]:
    """A call whose name stands before its JSON arguments at `pos`; where these end."""
    read = read_json(text, pos)
    arguments = read.value if isinstance(read.value, dict) else None
    return key_for_tool(name, arguments), max(pos, read.end)


def named_calls(
    text: str, call: re.Pattern[str], to_arguments: re.Pattern[str]
) -> tuple[GapKey, ...]:
    """Calls whose names are group 1 of `call`.

    to_arguments: what may stand between that and JSON arguments.
    """
    keys: list[GapKey] = []
    pos = 0
    while found := call.search(text, pos):
        key, pos = key_for_tool(found[1]), found.end()
        if opening := to_arguments.match(text, pos):
            key, pos = named_call(found[1], text, opening.end())
        keys.append(key)
    return tuple(keys)


def _arguments_of(call: Mapping[str, object]) -> Mapping[str, object] | str | None:
    """The arguments of a call object under any of their names."""
    for field in (*_ARGUMENTS, "input", "args"):
        value = call.get(field)
        if isinstance(value, Mapping | str):
            return value
    return None


def _call_key(item: Mapping[str, object]) -> GapKey | None:
    kind, function, name = item.get("type"), item.get("function"), item.get("name")
    if isinstance(kind, str) and kind in _SHELL_CALL_TYPES:
        action = item.get("action")
        return key_for_tool("shell", action if isinstance(action, Mapping) else None)
    if isinstance(function, Mapping):
        inner = function.get("name")
        if _is_name(inner) and not _is_definition(function):
            return key_for_tool(str(inner), _arguments_of(function))
        return None
    announced = isinstance(kind, str) and kind in _CALL_TYPES
    called = announced or any(field in item for field in _ARGUMENTS)
    if called and _is_name(name) and not _is_definition(item):
        return key_for_tool(str(name), _arguments_of(item))
    return None


def _is_name(name: object) -> bool:
    return isinstance(name, str) and bool(name.strip())


def _is_definition(function: Mapping[str, object]) -> bool:
    """Whether this describes a tool (a model may repeat its prompt) or calls it."""
    schema = function.get("parameters")
    has_schema = isinstance(schema, Mapping) and "properties" in schema
    return has_schema or ("description" in function and "arguments" not in function)
