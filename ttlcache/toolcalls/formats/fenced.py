"""Fenced shell blocks: the one action of mini-swe-agent and its like."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ttlcache.toolcalls.shell import shell_key
from ttlcache.types import GapKey

SHELL_TOOL = "bash"
_ACTION_LANGUAGE = "mswea_bash_command"
_SHELL_LANGUAGES = frozenset({"bash", "sh", "shell", "zsh", _ACTION_LANGUAGE})
# Calls may stand in these; other blocks are source code that may look like calls.
_CALL_LANGUAGES = frozenset(
    {"", "json", "jsonc", "xml", "text", "txt", "plaintext", "tool_call", "tool_calls"}
    | {"tool_code", "tool_use"}
)
_MARK = re.compile(
    r"^[ \t]{0,16}(`{3,64})[ \t]{0,16}+([A-Za-z_][\w+.#-]{0,32}+)?+([^`\n]*+)$",
    re.MULTILINE,
)


@dataclass(frozen=True, slots=True)
class Fence:
    """A fenced block. `body` has only whole lines when nothing closed it."""

    language: str
    body: str
    start: int
    end: int
    closed: bool


def fences(text: str) -> Iterator[Fence]:
    """The fenced blocks of `text`; the first bare mark closes a block."""
    opening: re.Match[str] | None = None
    for mark in _MARK.finditer(text):
        if opening is None:
            opening = mark
        elif not mark[2] and not mark[3].strip() and len(mark[1]) >= len(opening[1]):
            body = text[opening.end() + 1 : mark.start()]
            yield _fence(opening, body, mark.end(), closed=True)
            opening = None
    if opening is not None:
        body = text[opening.end() + 1 :]
        body = body[: body.rfind("\n") + 1]
        yield _fence(opening, body, len(text), closed=False)


def code_blocks(text: str) -> list[Fence]:
    """The blocks of source code, where no structured call is made."""
    if "```" not in text:
        return []
    return [f for f in fences(text) if f.language not in _CALL_LANGUAGES]


def without(text: str, blocks: Iterable[Fence]) -> str:
    """`text` without `blocks`."""
    kept, pos = [], 0
    for block in blocks:
        kept.append(text[pos : block.start])
        pos = block.end
    kept.append(text[pos:])
    return "".join(kept)


def fenced_shell(text: str) -> tuple[GapKey, ...]:
    """Exactly one shell block is an action.

    Several are a format error to such agents, and instructions to a human reader
    elsewhere: no call. Blocks marked as actions hide plain ones.
    """
    if "```" not in text:
        return ()
    blocks = [f for f in fences(text) if f.language in _SHELL_LANGUAGES]
    actions = [f for f in blocks if f.language == _ACTION_LANGUAGE] or blocks
    if len(actions) != 1 or (actions[0].closed and not actions[0].body.strip()):
        return ()
    return (shell_key(actions[0].body, SHELL_TOOL),)


def _fence(mark: re.Match[str], body: str, end: int, *, closed: bool) -> Fence:
    return Fence((mark[2] or "").lower(), body, mark.start(), end, closed)
