"""Each form in which clients and routers name programs, as requests.txt has them.

Under `=== rule -> program hints` come its headers and its body.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.connector.test_http_clues import body
from tests.documented import HEADER_NAMES
from ttlcache.programs.hints import parse_hints
from ttlcache.types import Hints
from ttlcache_connector.http import known_clients as known
from ttlcache_connector.http.clues import from_body, from_headers, with_hints

CLAUDE = {"X-Claude-Code-Session-Id": "s", "X-Claude-Code-Agent-Id": "a"}
Form = tuple[dict[str, str], dict[str, Any], str, str | None, Hints]


def form(block: str) -> Form:
    """Headers, members of the body; the rule, the program and the hints in them."""
    head, *lines = block.partition("\n\n")[0].splitlines()
    rule, _, session, hints = head.split(" ", 3)
    start = next((n for n, line in enumerate(lines) if line[0] == "{"), len(lines))
    headers = dict(line.split(": ", 1) for line in lines[:start])
    fields = json.loads("\n".join(lines[start:]) or "{}")
    program = None if session == "none" else session
    return headers, fields, rule, program, Hints(**json.loads(hints))


TEXT = Path(__file__).with_name("requests.txt").read_text()
FORMS = [*map(form, re.split(r"^=== ", TEXT, flags=re.MULTILINE)[1:])]


def found(headers: dict[str, str], fields: dict[str, Any]) -> tuple[Any, Hints]:
    """The clues of a request, and the hints as the engine reads them."""
    sent = body(**fields)
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    clues = from_body(sent, from_headers(raw))
    got = json.loads(with_hints(sent, clues) or sent)
    return clues, parse_hints(got.get("kv_transfer_params"), got.get("vllm_xargs"))


@pytest.mark.parametrize(("headers", "fields", "rule", "session", "hints"), FORMS)
def test_every_form_is_read(headers, fields, rule, session, hints):
    clues, told = found(headers, fields)
    assert (clues.rule, clues.dropped, told) == (rule, (), hints)
    assert clues.session == session


def test_there_is_a_request_for_every_row():
    headers = {name.lower().encode() for row in FORMS for name in row[0]}
    assert headers == HEADER_NAMES
    rules = {row[2] for row in FORMS}
    assert rules <= set(known.RULES)
    bodies = repr([row[1] for row in FORMS])
    for form in known.BODY_FORMS:
        assert form.rule in rules
        names = (*form.path, *form.session, *form.parent, *dict(form.last))
        assert [name for name in names if name not in bodies] == []
    for name in sum(known.BODY_HINTS, ()):
        assert name in bodies


def test_headers_outrank_objects_in_the_body():
    fields = {"agent_hint": {"session_id": "b", "parent_session_id": "c"}}
    clues, told = found(CLAUDE, fields)
    assert (clues.session, told) == ("s:a", Hints(parent_id="s"))


@pytest.mark.parametrize(
    ("headers", "fields", "reasons"),
    [
        ({"X-Session-Final": "maybe"}, {}, ("bool_type",)),
        ({}, {"agent_hint": {"session_id": [1]}}, ("id_type",)),
        ({}, {"nvext": {"agent_context": {"session_final": "x"}}}, ("bool_type",)),
        ({}, {"nvext": {"agent_hints": {"priority": 1 << 31}}}, ("priority_range",)),
        ({}, {"vllm_xargs": {"agentic_context": "{"}}, ()),
        ({}, {"vllm_xargs": {"agentic_context": '{"a":"' + "x" * 20_000 + '"}'}}, ()),
    ],
)
def test_what_does_not_fit_is_counted_and_changes_nothing(headers, fields, reasons):
    clues, told = found(headers, fields)
    assert (clues.rule, clues.session, clues.dropped) == ("none", None, reasons)
    assert told == Hints()


def test_an_id_of_an_agent_stays_bounded():
    headers = {"X-Claude-Code-Session-Id": "s" * 256, "X-Claude-Code-Agent-Id": "a"}
    clues, told = found(headers, {})
    assert clues.session.startswith("sha256-")
    assert told.parent_id == "s" * 256
