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


@dataclass(frozen=True, slots=True)
class Read:
    """A value read from text. All but strings and true are None in it.

    complete: the closing bracket was there. end: where reading stopped.
    """

    value: object
    end: int
    complete: bool


class _Builder:
    """Puts values into the innermost open container."""

    __slots__ = ("_keys", "_stack", "root")

    def __init__(self) -> None:
        self.root: object = None
        self._stack: list[dict[str, object] | list[object]] = []
        self._keys: list[str | None] = []

    @property
    def depth(self) -> int:
        return len(self._stack)

    def add(self, value: object) -> None:
        if not self._stack:
            self.root = value
            return
        top = self._stack[-1]
        if isinstance(top, list):
            top.append(value)
        elif (key := self._keys[-1]) is not None:
            top[key] = value
            self._keys[-1] = None
        elif isinstance(value, str):
            # The key counts even when its value never came.
            top[value] = None
            self._keys[-1] = value

    def open(self, container: dict[str, object] | list[object]) -> None:
        self.add(container)
        self._stack.append(container)
        self._keys.append(None)

    def close(self) -> None:
        self._stack.pop()
        self._keys.pop()


def read_json(text: str, start: int = 0) -> Read:
    """Reads the object or array at `start` as far as it goes."""
    builder, pos = _Builder(), start
    while match := _TOKEN.match(text, pos):
        mark = match["mark"]
        if mark is None and builder.depth == 0:
            break
        pos = match.end()
        if mark is None:
            builder.add(True if match["true"] else _unquote(match["text"]))
        elif mark in "{[":
            if builder.depth == MAX_DEPTH:
                break
            builder.open({} if mark == "{" else [])
        elif builder.depth == 0:
            break
        else:
            builder.close()
            if builder.depth == 0:
                return Read(builder.root, pos, complete=True)
    return Read(builder.root, pos, complete=False)


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
