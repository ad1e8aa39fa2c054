"""Which tool runs next, read from what the model wrote in a finished turn.

`formats` holds one file a family of formats, `chain` tries them in order. `shell` reads
commands: most agents have one tool, and its name alone predicts nothing.
"""

from __future__ import annotations

from ttlcache.toolcalls.chain import detect
from ttlcache.toolcalls.formats.json_items import detect_items
from ttlcache.toolcalls.keys import key_for_tool
from ttlcache.toolcalls.shell import shell_key
from ttlcache.toolcalls.tool_names import is_subagent

__all__ = [
    "detect",
    "detect_items",
    "is_subagent",
    "key_for_tool",
    "shell_key",
]
