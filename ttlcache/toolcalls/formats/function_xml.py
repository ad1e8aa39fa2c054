"""Qwen3-coder and OpenHands: the function's name inside the opening tag."""

from __future__ import annotations

import re

from ttlcache.toolcalls.formats.xml_tags import parse_tags
from ttlcache.types import GapKey

_TAGS = re.compile(
    r"""<function=(?P<call>[\w.:/-]{1,128})\s?>
      | (?P<end_call></function>)
      | <parameter=(?P<param>[\w.:/-]{1,128})\s?>
      | (?P<end_param></parameter>)""",
    re.VERBOSE,
)


class FunctionXml:
    """`<function=execute_bash><parameter=command>…</parameter></function>`."""

    name = "function-xml"

    def parse(self, text: str) -> tuple[GapKey, ...]:
        return parse_tags(text, _TAGS) if "<function=" in text else ()
