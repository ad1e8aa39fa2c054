"""Which program an HTTP request belongs to: every header and body form once."""

from __future__ import annotations

import json

import msgspec
import pytest

from ttlcache.programs.client_values import MAX_INT
from ttlcache.programs.hints import parse_hints
from ttlcache_connector.http.body import opening, parse
from ttlcache_connector.http.identity import (
    Clues,
    from_body,
    from_headers,
    split_path,
    with_hints,
)
from ttlcache_connector.http.naming import label

CHAT = [
    {"role": "system", "content": "You are an agent."},
    {"role": "user", "content": "Fix the bug."},
]


def body(**fields: object) -> bytes:
    return json.dumps({"model": "m", "messages": CHAT, **fields}).encode()


def conversation(sent: bytes) -> bytes | None:
    parsed = parse(sent)
    return None if parsed is None else opening(parsed)


def test_vllms_own_header_outranks_the_others():
    both = [(b"session-id", b"codex-1"), (b"x-session-id", b"own")]
    assert from_headers(both) == Clues("x-session-id", "own")


def test_empty_headers_name_nothing():
    assert from_headers([(b"session-id", b"  "), (b"accept", b"*/*")]) == Clues()


@pytest.mark.parametrize(
    ("fields", "rule", "session"),
    [
        ({"job_id": 17}, "job-id", "17"),
        ({"session_id": "s"}, "body-session", "s"),
        ({"metadata": {"session_id": "s"}}, "body-session", "s"),
        (
            {"metadata": {"user_id": '{"device_id":"d","session_id":"c-1"}'}},
            "claude-code-body",
            "c-1",
        ),
        (
            {"metadata": {"user_id": "user_ab_account__session_57a121ec-f78c"}},
            "claude-code-body",
            "57a121ec-f78c",
        ),
        ({"job_id": "j", "user": "u"}, "job-id", "j"),
    ],
)
def test_bodies_that_name_a_program(fields, rule, session):
    clues = from_body(body(**fields))
    assert (clues.rule, clues.session) == (rule, session)


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"prompt_cache_key": "k"}, "prompt-cache-key"),
        ({"safety_identifier": "k"}, "safety-identifier"),
        ({"user": "k"}, "user"),
        ({"metadata": {"user_id": "k"}}, "user"),
    ],
)
def test_a_users_name_is_joined_with_the_conversations_opening(fields, rule):
    first = from_body(body(**fields))
    assert first.rule == rule
    later = [*CHAT, {"role": "assistant", "content": "ls"}]
    marked = [dict(m) for m in later]
    marked[1]["cache_control"] = {"type": "ephemeral"}
    other = [CHAT[0], {"role": "user", "content": "Another task."}]
    assert from_body(body(**{**fields, "messages": later})).session == first.session
    assert from_body(body(**{**fields, "messages": marked})).session == first.session
    assert from_body(body(**{**fields, "messages": other})).session != first.session


def test_a_users_name_alone_tells_no_program():
    completion = json.dumps({"prompt": "x", "user": "k"}).encode()
    assert from_body(completion).session is None
    stored = {"previous_response_id": "r", "user": "k"}
    assert from_body(body(**stored)).session is None


def test_text_inside_a_message_is_no_field():
    talk = '"job_id": 3, "cache_control": {"type": "ephemeral", "ttl": "1h"}'
    chat = [{"role": "user", "content": talk}]
    assert from_body(body(messages=chat)) == Clues()


@pytest.mark.parametrize(
    ("markers", "ttl"),
    [
        ([{"type": "ephemeral"}], "5m"),
        ([{"type": "ephemeral", "ttl": "1h"}, {"type": "ephemeral"}], "1h"),
        ([{"type": "ephemeral", "ttl": "soon"}], None),
        ([{"type": "other", "ttl": "1h"}], None),
    ],
)
def test_anthropic_cache_control_becomes_a_wish(markers, ttl):
    blocks = [{"type": "text", "text": "t", "cache_control": m} for m in markers]
    hints = from_body(body(system=blocks)).hints
    assert hints == ({} if ttl is None else {"ttlcache": {"ttl": ttl}})
    assert parse_hints(dict(hints)).rejected == ()


def test_vllm_continuums_fields_reach_the_engine_as_they_came():
    sent = body(
        job_id="j", is_last_step=True, this_func_call="pytest", last_func_call="ls"
    )
    clues = from_body(sent)
    changed = with_hints(sent, clues)
    got = json.loads(changed)
    assert changed.startswith(sent[:-1])
    hints = parse_hints(got["kv_transfer_params"])
    assert (hints.program_id, hints.is_last_step, hints.tools) == (
        "j",
        True,
        ("pytest",),
    )
    assert {k: v for k, v in got.items() if k != "kv_transfer_params"} == json.loads(
        sent
    )


def test_a_clients_own_hints_win_and_stay():
    own = {"do_remote_decode": True, "ttlcache": {"program_id": "mine"}}
    sent = body(job_id="j", kv_transfer_params=own)
    got = json.loads(with_hints(sent, from_body(sent)))["kv_transfer_params"]
    assert got == {"job_id": "j", **own}
    assert parse_hints(got).program_id == "mine"


def test_nothing_to_add_leaves_the_body_alone():
    plain = body(user="u")
    assert with_hints(plain, from_body(plain)) is None


def test_parameters_that_vllm_will_refuse_stay_as_they_are():
    for wrong in ([], "x", 3):
        sent = body(job_id="j", kv_transfer_params=wrong)
        assert with_hints(sent, from_body(sent)) is None
    sent = body(job_id="j", kv_transfer_params=None)
    assert json.loads(with_hints(sent, from_body(sent)))["kv_transfer_params"]


def test_hints_too_large_are_left_out():
    sent = body(this_func_call="x" * 10_000)
    assert with_hints(sent, from_body(sent)) is None


@pytest.mark.parametrize(
    "junk",
    [
        b"",
        b"{",
        b"[]",
        b'"user": 1',
        b'{"user": {"a": [',
        b'{"user": "x", "messages": 7}',
        b'{"metadata": 3, "user": "\xff"}',
        b'{"metadata": {"user_id": "{"}}',
        b'{"user_id": 1, "metadata": ' + b"[" * 100_000,
        b'{"metadata": {"user_id": {"session_id": []}}, "job_id": [1]}',
    ],
)
def test_junk_says_nothing(junk):
    clues = from_body(junk)
    assert clues.session is None
    assert clues.rule == "none"


def test_ids_are_bounded_and_fit_into_a_header():
    assert label("x" * 256) == "x" * 256
    for odd in ("x" * 257, "é", "a\nb"):
        assert label(odd).startswith("sha256-")
    for nothing in ("", "  ", None, True, 1.5, ["a"], 1 << 64, "\ud800"):
        assert label(nothing) is None


def test_a_session_in_the_url():
    assert split_path("/sessions/a%20b/v1/messages") == ("a b", "/v1/messages")
    assert split_path("/v1/messages") == (None, "/v1/messages")
    assert split_path("/sessions/a") == (None, "/sessions/a")


def test_blanks_without_end_are_read_once():
    """A body of blanks must not cost its square: 1 MB would take minutes."""
    text = " " * 1_000_000 + ", " * 100_000
    body = {"messages": [{"role": "user", "content": text}]}
    found = conversation(msgspec.json.encode(body))
    assert found is not None
    assert text.encode() in found


def test_cache_markers_are_no_part_of_the_opening():
    def body(marker: str) -> bytes:
        return b'{"messages":[{"role":"user","content":"x"%s}]}' % marker.encode()

    bare = conversation(body(""))
    assert conversation(body(',\n    "cache_control": {"type":"ephemeral"}')) == bare
    assert conversation(body(',"cache_control":null')) == bare


def nested(depth: int) -> list:
    value: list = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("fields", "reasons"),
    [
        ({"job_id": nested(500)}, ("id_type",)),
        ({"job_id": 1 << 64}, ("id_range",)),
        ({"job_id": "\ud800"}, ("id_encoding",)),
        ({"job_id": float("nan")}, ("id_type",)),
        ({"job_id": "x" * 1_000_000}, ("id_too_long",)),
        ({"this_func_call": nested(500)}, ("tool_type",)),
        ({"this_func_call": "\ud800"}, ("tool_encoding",)),
        ({"is_last_step": nested(500)}, ("bool_type",)),
        ({"metadata": {"session_id": "\ud800"}}, ("id_encoding",)),
        ({"metadata": {"user_id": 1 << 64}}, ("id_range",)),
        ({"user": "\udc00"}, ("id_encoding",)),
        ({"last_func_call": nested(500)}, ()),
    ],
)
def test_what_does_not_fit_is_dropped_and_the_body_stays(fields, reasons):
    sent = body(**fields)
    clues = from_body(sent)
    assert clues.dropped == reasons
    assert clues.session is None
    assert with_hints(sent, clues) is None


def test_a_value_that_does_not_fit_costs_no_other_one():
    sent = body(job_id=nested(500), session_id="s", this_func_call="bash", x="\ud800")
    clues = from_body(sent)
    assert (clues.session, clues.hints) == ("s", {"this_func_call": ["bash"]})
    assert clues.dropped == ("id_type",)


@pytest.mark.parametrize(
    ("fields", "expected", "reasons"),
    [
        (
            {"kv_transfer_params": {"a": nested(500), "b": MAX_INT}},
            {"kv_transfer_params": {"b": MAX_INT}},
            ("nested_too_deep",),
        ),
        (
            {"kv_transfer_params": {"ttlcache": {"program_id": "\ud800"}}},
            {"kv_transfer_params": {}},
            ("nested_encoding",),
        ),
        (
            {"kv_transfer_params": {"a": "\ud800"}, "job_id": "j"},
            {"kv_transfer_params": {"job_id": "j"}},
            ("nested_encoding",),
        ),
        (
            {"vllm_xargs": {"ttlcache_tool": "\ud800", "top_a": 1}},
            {"vllm_xargs": {"top_a": 1}},
            ("nested_encoding",),
        ),
        ({"session_id": "\ud800"}, {"session_id": None}, ("id_encoding",)),
    ],
)
def test_what_vllm_could_not_carry_to_its_engine_is_replaced(fields, expected, reasons):
    sent = body(**fields)
    clues = from_body(sent)
    assert clues.dropped == reasons
    assert json.loads(with_hints(sent, clues)) == json.loads(sent) | expected


def test_what_vllm_refuses_itself_stays_for_it_to_refuse():
    for fields in (
        {"vllm_xargs": {"a": nested(500)}},
        {"vllm_xargs": {"a": 1 << 64}},
        {"vllm_xargs": {"a": {"\ud800": 1}}},
        {"kv_transfer_params": {"a": ["\ud800", 1 << 64]}},
        {"kv_transfer_params": {"a": [nested(500), -(1 << 63) - 1]}},
        {"kv_transfer_params": {"a": 1 << 64, "b": float("nan")}},
    ):
        sent = body(**fields)
        assert with_hints(sent, from_body(sent)) is None
    sent = body(kv_transfer_params={"a": float("nan"), "b": 1 << 70}, job_id="j")
    changed = with_hints(sent, from_body(sent))
    assert changed.endswith(
        b'"kv_transfer_params":{"job_id":"j","a":NaN,"b":1180591620717411303424}}'
    )


@pytest.mark.parametrize(
    "junk",
    [
        b'{"user": "u", "messages": [{"role": ' + b"[" * 900 + b"]" * 900 + b"}]}",
        b'{"cache_control": {"ttl": ' + b"[" * 10_000 + b"}}",
        b'{"cache_control": {"ttl": 1e999}}',
        b'{"cache_control": {"type": "ephemeral", "ttl": 1' + b"0" * 300 + b"}}",
        b'{"cache_control": {"ttl": "\xff"}}',
        b'{"metadata": {"user_id": "{\\"session_id\\":' + b"[" * 3000 + b'"}}',
        b'\xef\xbb\xbf{"job_id": "j"}',
        '{"job_id": "j"}'.encode("utf-16"),
        b'{"job_id": ' + b"9" * 5000 + b"}",
        b'{"job_id": "\xed\xa0\x80"}',
        b'{"user": "u", "input": "\xff"}',
    ],
)
def test_nothing_raises_on_what_a_client_sends(junk):
    clues = from_body(junk)
    with_hints(junk, clues)
    conversation(junk)
    assert clues.session in (None, "j")


def test_a_job_id_of_blanks_is_a_hint_and_no_session():
    clues = from_body(body(job_id=" ", user="u"))
    assert clues.rule == "user"
    assert clues.hints == {"job_id": " "}
