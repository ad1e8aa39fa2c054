"""The parser chain: from the output text of a turn to its gap key."""

from __future__ import annotations

from ttlcache.toolcalls.base import Parser, combine
from ttlcache.toolcalls.formats.deepseek import deepseek
from ttlcache.toolcalls.formats.fenced import code_blocks, fenced_shell, without
from ttlcache.toolcalls.formats.harmony import harmony
from ttlcache.toolcalls.formats.hermes import hermes
from ttlcache.toolcalls.formats.json_items import json_items
from ttlcache.toolcalls.formats.mistral import mistral
from ttlcache.toolcalls.formats.terminal_bench import terminal_bench
from ttlcache.toolcalls.formats.xml_tags import anthropic_invoke, function_xml
from ttlcache.types import GapKey

#: Characters of a text that are looked at: its head, which names the tool of one
#: long call, and its tail, where the calls of a long answer are.
HEAD_LIMIT = 8 * 1024
TAIL_LIMIT = 24 * 1024
SCAN_LIMIT = HEAD_LIMIT + TAIL_LIMIT

# Explicit tags come before shapes that prose or arguments can have by chance.
_TAGGED: tuple[Parser, ...] = (
    harmony,
    deepseek,
    mistral,
    function_xml,
    anthropic_invoke,
    hermes,
)
_SHAPED: tuple[Parser, ...] = (terminal_bench, json_items)
_FENCED: tuple[Parser, ...] = (fenced_shell,)
_REASONING = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))


def detect(text: str, *, fences: bool = True) -> GapKey | None:
    """The gap key of the calls that a turn's output makes; None without a call.

    `fences` off: shell blocks are prose, because the server has tool calls of its own.

    Never raises. Linear time: one search for the end of the reasoning, then
    `SCAN_LIMIT` characters at most are parsed.
    Calls that the model only thought of, before the end of its reasoning, and
    calls inside source code blocks do not count. Special tokens should be in the
    text: most formats are marked by them.
    """
    answer = _window(_answer(text))
    code = code_blocks(answer)
    # A tag after a block that nothing closes is a call; a mere shape there is code.
    tagged = without(answer, (block for block in code if block.closed))
    shaped = without(answer, code)
    stages = ((tagged, _TAGGED), (shaped, _SHAPED), (answer, _FENCED))
    for part, parsers in stages if fences else stages[:2]:
        for parser in parsers:
            if keys := parser(part):
                return combine(keys)
    return None


def _window(text: str) -> str:
    if len(text) <= SCAN_LIMIT:
        return text
    return text[:HEAD_LIMIT] + text[-TAIL_LIMIT:]


def _answer(text: str) -> str:
    """`text` after its reasoning; chat templates may have opened that already."""
    for opening, closing in _REASONING:
        reasoning, closed, answer = text.partition(closing)
        is_open = text[:64].lstrip().startswith(opening)
        if is_open or (closed and opening not in reasoning):
            return answer
    return text
