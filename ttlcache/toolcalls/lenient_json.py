"""Reads the JSON that models write: half-written, badly quoted, or fine.

Not `json`: a truncated call still tells its tool, and no input may cost more than
linear time or deep recursion.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

#: Nesting beyond this is no tool call.
MAX_DEPTH = 32

# Possessive repeats: a missing closing quote must not backtrack.
_TOKEN = re.compile(
    r"""[\s,:]*+(?:
        (?P<text>"[^"\\]*+(?:\\.[^"\\]*+)*+"|'[^'\\]*+(?:\\.[^'\\]*+)*+')
      | (?P<mark>[{}\[\]])
      | (?P<true>(?:true|True)\b)
      | (?:-?\d[\w.+-]*+|false|null|False|None)\b
    )""",
    re.VERBOSE | re.DOTALL,
)
_OBJECT = re.compile(r"""\{\s*+["']""")
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|.)", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}
_OPENING = ("{", "[")
_Container = dict[str, object] | list[object]


@dataclass(frozen=True, slots=True)
class Read:
    """A value read from text. All but strings and true are None in it.

    end: where reading stopped.
    """

    value: object
    end: int


def read_json(text: str, start: int = 0) -> Read:
    """Reads the object or array at `start` as far as it goes."""
    outermost: list[object] = []
    # Open containers, innermost last, each with the key that waits for its value.
    opened: list[tuple[_Container, list[str]]] = [(outermost, [])]
    pos, complete = start, False
    while not complete and (token := _TOKEN.match(text, pos)):
        mark, pos = token["mark"], token.end()
        if mark in _OPENING:
            if len(opened) > MAX_DEPTH:
                break
            container: _Container = {} if mark == "{" else []
            _add(*opened[-1], container)
            opened.append((container, []))
        elif len(opened) == 1:
            break
        elif mark is None:
            _add(*opened[-1], True if token["true"] else _unquote(token["text"]))
        else:
            opened.pop()
            complete = len(opened) == 1
    return Read(outermost[0] if outermost else None, pos)


def _add(container: _Container, key: list[str], value: object) -> None:
    """Put a value into an open container; `key` holds what waits there, if anything."""
    if isinstance(container, list):
        container.append(value)
    elif key:
        container[key.pop()] = value
    elif isinstance(value, str):
        # The key counts even when its value never came.
        container[value] = None
        key.append(value)


def read_objects(text: str) -> Iterator[Read]:
    """Every outermost JSON object in `text`, complete or not."""
    pos = 0
    while match := _OBJECT.search(text, pos):
        read = read_json(text, match.start())
        yield read
        pos = max(read.end, match.start() + 1)


def _unquote(token: str | None) -> str | None:
    if token is None:
        return None
    body = token[1:-1]
    return _ESCAPE.sub(_unescape, body) if "\\" in body else body


def _unescape(match: re.Match[str]) -> str:
    code = match[1]
    if len(code) > 1:
        return chr(int(code[1:], 16))
    return _ESCAPED.get(code, code)
