"""Anthropic's textual form of tool_use; its JSON blocks are in `json_items`."""

from __future__ import annotations

import re

from ttlcache.toolcalls.formats.xml_tags import parse_tags
from ttlcache.types import GapKey

# Some models put a namespace or a marker before the tag's name.
_TAGS = re.compile(
    r"""<[^\s<>/"]{0,16}invoke\s+name="(?P<call>[^"<>\n]{1,128})"\s?>
      | (?P<end_call></[^\s<>/"]{0,16}invoke>)
      | <[^\s<>/"]{0,16}parameter\s+name="(?P<param>[^"<>\n]{1,128})"[^<>\n]{0,64}>
      | (?P<end_param></[^\s<>/"]{0,16}parameter>)""",
    re.VERBOSE,
)


class AnthropicInvoke:
    """`<invoke name="Bash"><parameter name="command">…</parameter></invoke>`."""

    name = "anthropic-invoke"

    def parse(self, text: str) -> tuple[GapKey, ...]:
        return parse_tags(text, _TAGS) if "invoke" in text else ()
