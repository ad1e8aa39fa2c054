"""One request for each form in which clients and routers name programs."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.connector.test_http_identity import body
from ttlcache.programs.client_values import MAX_SECONDS
from ttlcache.programs.hints import parse_hints
from ttlcache.types import Hints
from ttlcache_connector.http.forms import (
    BODY_FORMS,
    BODY_HINTS,
    DIRECTIVES,
    ENVELOPE,
    HEADER_NAMES,
    RETAIN_ACTION,
    RULES,
)
from ttlcache_connector.http.identity import from_body, from_headers, with_hints

CLAUDE = {"X-Claude-Code-Session-Id": "s", "X-Claude-Code-Agent-Id": "a"}
CODEX = {"session-id": "s", "thread-id": "t"}
CHILD = Hints(parent_id="p")
LAST = Hints(is_last_step=True)
#: Headers, members of the body, and the rule, the program and the hints in them.
FORMS: list[tuple[dict[str, str], dict[str, Any], str, str | None, Hints]] = [
    ({"X-Session-ID": " s "}, {}, "x-session-id", "s", Hints()),
    (  # OpenCode
        {"X-Session-ID": "s", "X-Session-Affinity": "s", "X-Parent-Session-ID": "p"},
        {},
        "x-session-id",
        "s",
        CHILD,
    ),
    ({"X-TTLCache-Program": "s"}, {}, "x-ttlcache-program", "s", Hints()),
    ({"X-Dynamo-Session-ID": "s"}, {}, "dynamo", "s", Hints()),
    (
        {"X-Dynamo-Session-ID": "s", "X-Dynamo-Parent-Session-ID": "p"},
        {},
        "dynamo",
        "s",
        CHILD,
    ),
    (
        {"X-Dynamo-Session-ID": "s", "X-Dynamo-Session-Final": "true"},
        {},
        "dynamo",
        "s",
        LAST,
    ),
    ({"X-Claude-Code-Session-Id": "s"}, {}, "claude-code", "s", Hints()),
    (CLAUDE, {}, "claude-code", "s:a", Hints(parent_id="s")),
    (
        CLAUDE | {"X-Claude-Code-Parent-Agent-Id": "p"},
        {},
        "claude-code",
        "s:a",
        Hints(parent_id="s:p"),
    ),
    ({"x-session-affinity": "s"}, {}, "session-affinity", "s", Hints()),
    ({"session-id": "s"}, {}, "codex", "s", Hints()),
    ({"session_id": "s"}, {}, "codex", "s", Hints()),
    (CODEX | {"thread-id": "s"}, {}, "codex", "s", Hints()),
    (
        CODEX | {"X-Codex-Parent-Thread-Id": "s"},
        {},
        "codex",
        "s:t",
        Hints(parent_id="s"),
    ),
    ({"session-id": "s", "X-Session-Final": "1"}, {}, "codex", "s", LAST),
    ({"X-Session-Final": "yes"}, {"session_id": "s"}, "body-session", "s", LAST),
    ({"x-llm-d-inference-fairness-id": "t"}, {}, "fairness-id", None, Hints()),
    ({"x-gateway-inference-fairness-id": "t"}, {}, "fairness-id", None, Hints()),
    (
        {},
        {
            "vllm_xargs": {
                "agentic_context": '{"program_id":"s","parent_program_id":"p"}'
            }
        },
        "agentic-context",
        "s",
        CHILD,
    ),
    (
        {},
        {
            "vllm_xargs": {
                "agentic_context": '{"session_id":7,"parent_id":"p",'
                '"expected_resume":false}'
            }
        },
        "agentic-context",
        "7",
        Hints(parent_id="p", is_last_step=True),
    ),
    (
        {},
        {
            "agent_hint": {
                "session_id": "s",
                "parent_session_id": "p",
                "cache_control": {"type": "ephemeral", "ttl": 20},
            }
        },
        "agent-hint",
        "s",
        Hints(parent_id="p", ttl_s=20.0),
    ),
    (
        {},
        {"agent_hint": {"session_id": "s", "expected_resume": False}},
        "agent-hint",
        "s",
        LAST,
    ),
    (
        {},
        {"nvext": {"agent_context": {"session_id": "s", "parent_session_id": "p"}}},
        "agent-context",
        "s",
        CHILD,
    ),
    (
        {},
        {"nvext": {"agent_context": {"session_id": "s", "session_final": True}}},
        "agent-context",
        "s",
        LAST,
    ),
    (  # Dynamo 1.2
        {},
        {
            "nvext": {
                "agent_context": {
                    "session_id": "of-all",
                    "trajectory_id": "s",
                    "parent_trajectory_id": "p",
                    "trajectory_final": True,
                }
            }
        },
        "agent-context",
        "s",
        Hints(parent_id="p", is_last_step=True),
    ),
    (  # Dynamo 1.1
        {},
        {"nvext": {"agent_context": {"program_id": "s", "parent_program_id": "p"}}},
        "agent-context",
        "s",
        CHILD,
    ),
    (
        {},
        {"nvext": {"agent_hints": {"priority": 5, "osl": 100}}},
        "none",
        None,
        Hints(priority_class=5),
    ),
    (  # llm-d's router
        {},
        {
            "retention_directives": [
                {"start": 0, "end": None, "priority": 70, "duration": 12.5},
                {"start": 0, "end": 512, "priority": 90, "duration": 900},
                {"start": 0, "end": None, "priority": 0, "duration": 800},
            ],
            "retention_scope": "of-a-parent",
        },
        "none",
        None,
        Hints(ttl_s=12.5),
    ),
    (
        {},
        {
            "kv_hints": {
                "protocol_version": "0.1",
                "message_id": "m",
                "actions": [
                    {"action_type": "kv.fetch", "payload": {"block_hashes": [1]}},
                    {
                        "action_id": "a",
                        "action_type": "kv.retain",
                        "action_version": "1.0",
                        "payload": {"directives": [{"priority": 1}]},
                    },
                ],
            }
        },
        "none",
        None,
        Hints(ttl_s=MAX_SECONDS),
    ),
]


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
    if rule == "fairness-id":
        assert clues.session.startswith("fairness-id-")
    else:
        assert clues.session == session


def test_there_is_a_request_for_every_row():
    headers = {name.lower().encode() for row in FORMS for name in row[0]}
    assert headers == HEADER_NAMES
    rules = {row[2] for row in FORMS}
    assert rules <= set(RULES)
    bodies = repr([row[1] for row in FORMS])
    for form in BODY_FORMS:
        assert form.rule in rules
        names = (*form.path, *form.session, *form.parent, *dict(form.last))
        assert [name for name in names if name not in bodies] == []
    for name in (*sum(BODY_HINTS, ()), DIRECTIVES, ENVELOPE, RETAIN_ACTION):
        assert name in bodies


def test_a_clients_own_hints_outrank_what_is_read_elsewhere():
    own = {"ttlcache": {"parent_id": "mine", "tool": "bash"}}
    clues, told = found(CLAUDE, {"kv_transfer_params": own})
    assert clues.session == "s:a"
    assert told == Hints(parent_id="mine", tools=("bash",))


def test_headers_outrank_objects_in_the_body():
    fields = {"agent_hint": {"session_id": "b", "parent_session_id": "c"}}
    clues, told = found(CLAUDE, fields)
    assert (clues.session, told) == ("s:a", Hints(parent_id="s"))


def test_a_tenants_id_tells_no_two_conversations_apart():
    header = {"x-llm-d-inference-fairness-id": "tenant"}
    one, _ = found(header, {})
    other, _ = found(header, {"messages": [{"role": "user", "content": "Else."}]})
    assert one.session != other.session
    assert found(header, {"prompt_cache_key": "k"})[0].rule == "prompt-cache-key"


@pytest.mark.parametrize(
    ("headers", "fields", "reasons"),
    [
        ({"X-Session-Final": "maybe"}, {}, ("bool_type",)),
        ({}, {"agent_hint": {"session_id": [1]}}, ("id_type",)),
        ({}, {"nvext": {"agent_context": {"session_final": "x"}}}, ("bool_type",)),
        ({}, {"nvext": {"agent_hints": {"priority": 1 << 31}}}, ("priority_range",)),
        (
            {},
            {"retention_directives": [{"priority": 1, "duration": -1}]},
            ("duration",),
        ),
        ({}, {"retention_directives": ["x"]}, ("number",)),
        ({}, {"kv_hints": {"actions": "x"}}, ()),
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


@pytest.mark.parametrize("sent", [b"[1]", b"{", b""])
def test_a_body_that_is_no_object_gets_no_hints(sent):
    named = from_headers([(b"x-claude-code-session-id", b"s"), (b"thread-id", b"t")])
    last = from_headers([(b"session-id", b"s"), (b"x-session-final", b"1")])
    for before in (named, last):
        clues = from_body(sent, before)
        assert clues.session == "s"
        assert with_hints(sent, clues) is None
