"""Calls as bare JSON: OpenAI items, `tool_calls`, Anthropic `tool_use`, Llama 3."""

from __future__ import annotations

from ttlcache.toolcalls.items import keys_in
from ttlcache.toolcalls.lenient_json import read_objects
from ttlcache.types import GapKey


class JsonItems:
    """JSON objects that are calls by their shape, anywhere in the text."""

    name = "json"

    def parse(self, text: str) -> tuple[GapKey, ...]:
        if not any(mark in text for mark in ('name"', "name'", "shell_call")):
            return ()
        return tuple(key for read in read_objects(text) for key in keys_in(read.value))
